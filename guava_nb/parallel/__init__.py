"""How one model is spread over the ranks of a process group; see README.md."""
