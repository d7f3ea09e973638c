"""Replicas kept in step: their state, and the exchange of one step. Knows the cluster; knows no epoch and no checkpoint."""
