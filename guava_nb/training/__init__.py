"""A training run at the orchestrator: its plan, its job, its handle."""
