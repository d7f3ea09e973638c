"""The worker: its session, its loop, its process."""
