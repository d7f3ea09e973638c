"""Checks of this machine and of a join code: what is here, what is missing, what to do about it. Shows nothing."""

from guava_nb.doctor.check import Check, exit_status
from guava_nb.doctor.joining import check_join
from guava_nb.doctor.launchers import check_launcher
from guava_nb.doctor.run import run_checks

__all__ = ["Check", "check_join", "check_launcher", "exit_status", "run_checks"]
