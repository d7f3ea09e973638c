"""Worker processes on this machine: starts them, watches them, tells how one ended. Knows no model and no session."""
