"""Data sets from what a user has: arrays, CSV files, folders of images, the digits that ship here. Knows no wire."""
