"""Passes over data without training: validation and prediction. Knows replica sets; knows no optimizer and no epoch."""
