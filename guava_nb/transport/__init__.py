"""Streams of bytes, blocking: memory, TCP, and TLS 1.3 over any of them."""
