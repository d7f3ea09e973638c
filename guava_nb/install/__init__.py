"""Brings this very version of guava_nb to a notebook that has none, through the session's own port; knows no torch."""
