"""Sums gradient buckets, relays collectives and the store. Knows sessions, ranks, tensors; decides no step and no commit."""
