"""The Job of some workers: what Kubernetes must be told so that an end is a leave, and a lost pod is replaced."""

from __future__ import annotations

import pytest

from guava_nb.cli.main import build_parser
from guava_nb.launchers.k8s_manifest import ASKED, JobWish, job_of, label_of, secret_of


def test_each_pod_is_one_worker_that_gets_sigterm_and_time() -> None:
    job = job_of("guava-1", JobWish(3, "img", gpus=1, memory="8Gi", cpu="2"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert pod["restartPolicy"] == "Never", "a policy for failures demands it"
    assert pod["terminationGracePeriodSeconds"] >= 60 and pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"nvidia.com/gpu": "1", "memory": "8Gi", "cpu": "2"}, "limits": {"nvidia.com/gpu": "1", "memory": "8Gi"},
    }  # fmt: skip
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_container_runs_a_line_that_the_command_takes() -> None:
    words = job_of("guava-1", JobWish(1, "img", python="/opt/python"))["spec"]["template"]["spec"]["containers"][0][
        "command"
    ]
    assert words[:3] == ["/opt/python", "-m", "guava_nb"]
    args = build_parser().parse_args(words[3:])
    assert (args.join_file, args.mark, args.gpus, args.asked_status) == (
        "/var/run/guava/join-code",
        "guava-1",
        "auto",
        ASKED,
    )


@pytest.mark.parametrize("made", [job_of("guava-1", JobWish(1, "img")), secret_of("guava-1", "x")])
def test_all_carries_the_mark(made: dict[str, dict[str, dict[str, str]]]) -> None:
    key, _, value = label_of("guava-1").partition("=")
    assert made["metadata"]["labels"][key] == value == "guava-1"
    assert not job_of("guava-1", JobWish(1, "img", gpus=0))["spec"]["template"]["spec"]["containers"][0]["resources"][
        "limits"
    ]
