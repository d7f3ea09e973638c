"""Batches: how they are read from a loader, split into shares, and carried as bytes. Knows no socket, worker or run."""
