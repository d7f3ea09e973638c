"""Rows of batches that workers keep between epochs: the policy and both ends. Knows rows; knows no step and no model."""
