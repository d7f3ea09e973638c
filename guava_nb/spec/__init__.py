"""From what a user says to records that any machine can build from, and back."""
