"""The `guava` command: parses a line, calls one object, shows the result. Knows the objects below; knows no message."""
