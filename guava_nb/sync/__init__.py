"""Keeping the replicas of a run in step: their state, and the exchange of one step."""
