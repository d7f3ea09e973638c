"""Starts `guava worker` on machines that people have already: by ssh, Slurm, Kubernetes, Ray, Docker or a package's own way."""

from guava_nb.launchers.launcher import Launcher
from guava_nb.launchers.registry import launcher_names, make_launcher

__all__ = ["Launcher", "launcher_names", "make_launcher"]
