"""What replicas do together: sums, buffers, batch statistics, ZeRO. Knows no stage and no split layer."""
