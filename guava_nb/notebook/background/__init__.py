"""A session in a process of its own beside the notebook: starts it, finds it, has it do what magics ask; trains nothing."""
