"""Workers as a Kubernetes Job, with a stand-in for kubectl."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from guava_nb.config.version import installed_version
from guava_nb.errors import ConfigError
from guava_nb.launchers import k8s
from guava_nb.launchers.k8s import KubernetesLauncher
from guava_nb.launchers.launcher import Order
from guava_nb.protocol.joincode import JoinCode
from tests.support.stand_ins import StandIns


@pytest.fixture
def kubectl(programs: StandIns) -> StandIns:
    programs.put("kubectl")
    return programs


def started(text: str, order: Order) -> KubernetesLauncher:
    launcher = KubernetesLauncher(text)
    launcher.check()
    launcher.start(order)
    return launcher


def items(programs: StandIns) -> dict[str, Any]:
    return {item["kind"]: item for item in json.loads(programs.input("kubectl"))["items"]}


def test_the_cluster_judges_first_and_the_code_goes_by_standard_input(kubectl: StandIns, order: Order) -> None:
    launcher = KubernetesLauncher("8,gpus=2,namespace=lab,context=big")
    launcher.check()
    assert order.code.encode() not in kubectl.input("kubectl"), "nothing secret before the start"
    launcher.start(order)
    assert kubectl.lines("kubectl") == [
        "--context=big --namespace=lab create --dry-run=server -f -", "--context=big --namespace=lab create -f -",
    ]  # fmt: skip
    made = items(kubectl)
    assert made["Secret"]["stringData"] == {"join-code": order.code.encode()}
    assert order.code.encode() not in json.dumps(made["Job"]) and launcher.count == 16
    container = made["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"guava-worker:{installed_version()}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_the_manifest_can_be_shown_instead(order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no kubectl is needed for it
    launcher = KubernetesLauncher("2,apply=no,gpus=0")
    launcher.check()
    said = launcher.start(order)
    path = order.folder / f"{launcher.mark}.yaml"
    assert yaml.safe_load(path.read_text())["kind"] == "Job" and path.read_text() in said
    code = order.folder / f"{launcher.mark}.code"
    assert f"--from-file=join-code={code}" in said and order.code.encode() not in said
    assert stat.S_IMODE(code.stat().st_mode) == 0o600
    assert launcher.end() == "" and not code.exists() and not path.exists()


def test_a_new_code_and_the_end_go_by_the_mark(kubectl: StandIns, order: Order) -> None:
    launcher = started("2", order)
    new = JoinCode.new("192.0.2.8", 4712)
    launcher.follow(new)
    assert json.loads(kubectl.input("kubectl"))["stringData"] == {"join-code": new.encode()}
    later = KubernetesLauncher("2")
    later.mark = launcher.mark
    assert later.end() == "" == launcher.end()
    assert set(kubectl.lines("kubectl")[-2:]) == {
        f"delete job,secret -l guava-nb/start={launcher.mark} --wait=false --ignore-not-found"
    }


def pod(phase: str, **status: Any) -> dict[str, Any]:
    return {"status": {"phase": phase, **status}}


def test_what_keeps_pods_is_told_once(kubectl: StandIns, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k8s, "LOOK_S", 0.0)
    launcher = started("2", order)
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no\nsuch image"}}}
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
    both = [pod("Pending", containerStatuses=[waiting]), pod("Pending", conditions=[unschedulable])]
    kubectl.put("kubectl", json.dumps({"status": {}}), when="job")
    kubectl.put("kubectl", json.dumps({"items": both}), when="pods")
    told = launcher.look()
    assert "2 pending" in told and "ErrImagePull: no such image" in told and "Insufficient nvidia.com/gpu" in told
    assert launcher.look() == "" and launcher.failure() == ""
    kubectl.put("kubectl", json.dumps({"items": [pod("Running"), pod("Running")]}), when="pods")
    assert launcher.look().endswith(": 2 running")
    kubectl.put("kubectl", json.dumps({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}), when="job")
    assert "is over" in launcher.look() and "is over" in launcher.failure()


def test_a_job_that_somebody_deleted_is_over(kubectl: StandIns, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k8s, "LOOK_S", 0.0)
    launcher = started("2", order)
    kubectl.put("kubectl", '{"items": []}', when="pods")
    assert "it was deleted" in launcher.look() and launcher.failure()


def test_what_the_cluster_refuses_is_told_before_anything_is_made(kubectl: StandIns) -> None:
    kubectl.put("kubectl", status=1, complains='Error from server (Forbidden): jobs.batch is forbidden: User "me"')
    with pytest.raises(ConfigError, match='jobs.batch is forbidden: User "me"'):
        KubernetesLauncher("2").check()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs the number"),
        ("2,imgae=x", 'has no "imgae". Did you mean "image"'),
        ("2,apply=perhaps", "should be yes or no"),
        ("2,gpus=-1", "whole number"),
    ],
)
def test_a_text_that_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        KubernetesLauncher(text)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
def test_the_users_own_kubectl_says_why_it_reaches_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="would not take this Job: "):
        KubernetesLauncher("2").check()
