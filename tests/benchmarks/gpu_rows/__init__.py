"""The contestants of tests/benchmarks/gpu.py, each in processes of its own."""
