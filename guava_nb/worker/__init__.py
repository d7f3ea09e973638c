"""The worker process: its session, its loop. Knows one replica; never imports the orchestrator's side (`cluster`)."""
