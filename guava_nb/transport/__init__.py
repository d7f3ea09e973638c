"""Blocking streams of bytes: memory, TCP, TLS and WebSocket over any stream. Knows deadlines; knows no message."""
