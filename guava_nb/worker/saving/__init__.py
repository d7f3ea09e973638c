"""States of a run that stay on this machine's disk, and differences of their weights."""
