"""Flat tensors as few bytes, and back. Knows torch's tensors; knows no records, sessions, steps or optimizers."""
