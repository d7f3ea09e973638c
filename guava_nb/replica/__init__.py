"""One model on one device: forward, backward, buckets, optimizer. Knows torch; knows no session and no network."""
