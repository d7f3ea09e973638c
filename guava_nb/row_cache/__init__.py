"""Rows that workers keep between epochs: the policy, and both ends of it."""
