"""The code of the user that workers run between runs: cells, values, packages and files."""
