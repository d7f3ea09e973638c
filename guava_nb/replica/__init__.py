"""One replica of the model on one device: forward, backward, buckets, optimizer. No network."""
