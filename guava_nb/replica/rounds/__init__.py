"""Several optimizer steps between two exchanges. Knows one replica; knows no other worker."""
