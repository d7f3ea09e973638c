"""Stages of a model on several ranks: cutting, schedules, what passes between them."""
