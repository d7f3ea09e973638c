"""The `guava` command: parses a line, calls one object, shows the result. Knows the objects below; knows no message."""

#: Threads in each process of a demo: its tensors are small, and threads that wait for each other need cores of their own.
DEMO_THREADS = 1
