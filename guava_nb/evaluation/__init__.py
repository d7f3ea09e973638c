"""Passes over data without training: validation and prediction."""
