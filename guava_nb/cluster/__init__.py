"""The orchestrator and its workers: sessions, members, jobs, the path between members. Knows no model and no batch."""
