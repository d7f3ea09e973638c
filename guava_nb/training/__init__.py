"""One run at the orchestrator: its plan, its job, its handle. Knows replica sets; knows no notebook and no forecast."""
