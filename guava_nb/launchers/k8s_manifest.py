"""The Job and the Secret of some workers, as Kubernetes reads them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from guava_nb.launchers.launcher import worker_words

__all__ = ["JobWish", "job_of", "label_of", "secret_of"]

LABEL = "guava-nb/start"
#: Where the Secret is in a pod.
_FOLDER, _KEY = "/var/run/guava", "join-code"
#: Seconds from SIGTERM to the end: a worker leaves after its step, when its state is handed over.
GRACE_S = 120
#: A pod that fails is tried again so many times in all, for each pod wished.
TRIES = 4
#: What a worker that was asked to end exits with: its pod was not done, so the Job replaces it.
ASKED = 143


@dataclass(frozen=True, slots=True)
class JobWish:
    """What a Job shall have: pods, each with a container of this image, and what each asks for."""

    pods: int
    image: str
    gpus: int = 1
    python: str = "python"
    cpu: str = ""
    memory: str = ""


def label_of(mark: str) -> str:
    """Selects what belongs to a start."""
    return f"{LABEL}={mark}"


def secret_of(mark: str, code: str) -> dict[str, Any]:
    """The Secret with the join code."""
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": {"name": mark, "labels": _labels(mark)},
        "stringData": {_KEY: code},
    }  # fmt: skip


def job_of(mark: str, wish: JobWish) -> dict[str, Any]:
    """The Job: one worker process a pod as its first process, so that it gets Kubernetes' SIGTERM itself.

    A pod whose node is drained or taken away does not count as failed, and is replaced.
    """
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": mark, "labels": _labels(mark)},
        "spec": {
            "completions": wish.pods,
            "parallelism": wish.pods,
            "completionMode": "Indexed",
            "backoffLimit": TRIES * wish.pods,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "ttlSecondsAfterFinished": 3600,
            "template": {
                "metadata": {"labels": _labels(mark)},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE_S,
                    "automountServiceAccountToken": False,
                    "containers": [_container(mark, wish)],
                    "volumes": [
                        {"name": "join-code", "secret": {"secretName": mark, "defaultMode": 0o440}},
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # DataLoader's processes use it
                    ],
                },
            },
        },
    }


def _labels(mark: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "guava-worker", LABEL: mark}


def _container(mark: str, wish: JobWish) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(wish.gpus)} if wish.gpus else {}
    limits = {**gpus, **({"memory": wish.memory} if wish.memory else {})}
    requests = {**limits, **({"cpu": wish.cpu} if wish.cpu else {})}
    return {
        "name": "worker",
        "image": wish.image,
        "command": [*worker_words(wish.python, f"{_FOLDER}/{_KEY}", mark, gpus="auto"), "--asked-status", str(ASKED)],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "join-code", "mountPath": _FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
