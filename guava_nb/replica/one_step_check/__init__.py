"""A batch whole against its pieces, on a copy of the model. Knows one replica; knows no other worker."""
