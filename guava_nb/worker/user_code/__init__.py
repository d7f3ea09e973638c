"""The user's own code on this worker between runs: cells, packages, files."""
