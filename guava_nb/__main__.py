"""`python -m guava_nb` is the guava command."""

from guava_nb.cli.main import command

if __name__ == "__main__":
    raise SystemExit(command())
