"""What the machine in the middle does for the others: adds buckets, relays collectives, keeps shared keys; it decides nothing."""
