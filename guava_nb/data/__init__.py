"""Batches: how they are read, split into shares, and carried as bytes."""
