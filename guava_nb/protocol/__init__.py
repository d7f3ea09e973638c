"""Bytes and states of the wire, without I/O; README.md is its specification. Knows no socket, no clock and no torch."""
