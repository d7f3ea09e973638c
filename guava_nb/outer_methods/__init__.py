"""How the work of a round becomes new weights. Knows flat tensors; knows no rounds, members, models or messages."""
