"""A model in stages on several ranks: cutting, schedules, what passes between stages. Knows no session."""
