"""What a run will send and receive, reckoned before it."""
