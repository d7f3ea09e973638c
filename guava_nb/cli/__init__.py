"""The guava command: demo, worker, doctor. Parses a line, calls one object, shows the result."""
