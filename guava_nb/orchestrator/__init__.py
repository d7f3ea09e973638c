"""The object that a user holds on the side that has the data: opens the session, trains, validates, predicts, saves."""

from guava_nb.orchestrator.orchestrator import Orchestrator

__all__ = ["Orchestrator"]
