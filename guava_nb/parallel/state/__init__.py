"""Which part of the full model a rank holds, and the full state from the parts. Knows tensors; sends nothing."""
