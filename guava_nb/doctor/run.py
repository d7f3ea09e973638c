"""The list of checks, in the order in which a person would mend things."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from guava_nb.doctor.check import Check
from guava_nb.doctor.gpu import check_energy, check_gpu, check_nvml
from guava_nb.doctor.launchers import check_launchers
from guava_nb.doctor.machine import check_cores, check_disk, check_memory
from guava_nb.doctor.network import check_connection, check_port
from guava_nb.doctor.software import (
    check_ipykernel,
    check_ipywidgets,
    check_packages,
    check_python,
    check_torch,
)
from guava_nb.doctor.tunnels import check_cloudflared, check_ngrok, check_ngrok_token, check_pyngrok, check_ssh

__all__ = ["CHECKS", "run_checks"]

CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_gpu,
    check_nvml,
    check_energy,
    check_ipykernel,
    check_ipywidgets,
    check_packages,
    check_port,
    check_connection,
    check_pyngrok,
    check_ngrok_token,
    check_ngrok,
    check_cloudflared,
    check_ssh,
    check_launchers,
    check_memory,
    check_cores,
    check_disk,
)


def run_checks(checks: Sequence[Callable[[], Check]] = CHECKS) -> list[Check]:
    """Run the checks; one that breaks is reported as a failure and does not hide the others."""
    return [_run(check) for check in checks]


def _run(check: Callable[[], Check]) -> Check:
    name = check.__name__.removeprefix("check_")
    try:
        return check()
    except Exception as error:  # a broken driver or package may raise anything; that is what the person must see
        return Check(name, "fail", f"the check itself failed with {type(error).__name__}: {error}")
