"""Worker processes: starting them, and what a process and its starter agree on."""
