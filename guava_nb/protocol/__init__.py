"""Bytes and states of the wire, without I/O; README.md is its specification."""
