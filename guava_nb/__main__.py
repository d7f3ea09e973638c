"""`python -m guava_nb` is the guava command."""

from guava_nb.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
