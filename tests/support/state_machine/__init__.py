"""A whole orchestrator against workers of every kind, one choice after another; see `tests/README.md`."""
