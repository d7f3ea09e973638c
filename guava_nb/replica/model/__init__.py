"""The model itself: built from its record, taken out of wrappers, compared, described."""
