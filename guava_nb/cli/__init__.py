"""The `guava` command: parses a line, calls one object, shows the result. Knows the objects of the rooms below; knows no message."""
