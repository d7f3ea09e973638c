"""Checks of this machine: what is here, what is missing, what to do about it. Shows nothing itself."""

from guava_nb.doctor.check import Check, exit_status
from guava_nb.doctor.run import run_checks

__all__ = ["Check", "exit_status", "run_checks"]
