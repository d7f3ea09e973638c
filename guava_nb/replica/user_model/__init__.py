"""The user's model itself: wrappers off, compared with what its class builds, watched during a run. Knows no steps."""
