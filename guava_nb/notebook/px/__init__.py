"""Cells, values, packages and files for the workers, from lines of a notebook. Knows the session's methods; knows no network."""
