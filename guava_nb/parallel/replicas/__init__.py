"""What replicas do together: sums, buffers, batch statistics, ZeRO."""
