"""The orchestrator and its workers: sessions, members, jobs, the way between members. Knows no model."""
