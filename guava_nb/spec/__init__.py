"""What a user names, as records that any machine can build from, and back. Knows source text; knows no worker and no run."""
