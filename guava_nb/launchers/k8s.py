"""Workers as the pods of a Kubernetes Job; the join code lies in a Secret. By the user's own kubectl."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any, ClassVar

from guava_nb.errors import ConfigError
from guava_nb.launchers.install_check import IMAGE, own_image
from guava_nb.launchers.k8s_manifest import JobWish, job_of, label_of, secret_of
from guava_nb.launchers.launcher import Launcher, Order, remove_secret
from guava_nb.launchers.programs import find_program, last_line, run_program
from guava_nb.protocol.joincode import JoinCode

__all__ = ["KubernetesLauncher"]

LOOK_S = 15.0
_WAY = "install it (kubernetes.io/docs/tasks/tools) and let it know your cluster; or say apply=no and take the manifest elsewhere"


class KubernetesLauncher(Launcher):
    """`k8s:N[,image=IMAGE][,gpus=G][,namespace=NAME][,context=NAME][,apply=no]`."""

    name = "k8s"
    example = "k8s:8,image=registry.example/guava:1,gpus=1"
    options: ClassVar = {
        "image": IMAGE,
        "gpus": "NVIDIA GPUs of each pod (1); 0 for none",
        "python": "the Python in the image (python)",
        "cpu": "processors that each pod asks for, such as 4 or 500m",
        "memory": "memory that each pod asks for and may take, such as 16Gi",
        "namespace": "of the cluster",
        "context": "of kubectl's configuration",
        "apply": "no: only show the manifest",
    }
    is_prompt = False

    def __init__(self, what: str) -> None:
        super().__init__(what)
        words, found = self.read(what)
        pods = self.read_count(words)
        if found.get("apply", "yes") not in ("yes", "no"):
            raise ConfigError(f"--on k8s: apply={found['apply']} should be yes or no")
        gpus = self.read_number(found, "gpus", 1)
        self.count = pods * max(1, gpus)
        self._wish = JobWish(
            pods,
            found.get("image") or own_image(),
            gpus,
            found.get("python", "python"),
            found.get("cpu", ""),
            found.get("memory", ""),
        )
        self._is_applied = found.get("apply") != "no"
        self._where = [f"--{key}={found[key]}" for key in ("context", "namespace") if found.get(key)]
        self._files: list[Path] = []
        self._looked, self._state, self._over, self._has_begun = 0.0, "", "", False

    def check(self) -> None:
        """Have the cluster itself judge the manifest, without making anything."""
        if not self._is_applied:
            return
        done = self._kubectl("create", "--dry-run=server", "-f", "-", text=self._all("-"))
        if done.returncode:
            raise ConfigError(
                f"the cluster would not take this Job: {last_line(done.stderr)} (kubectl auth can-i create jobs says whether "
                "you may)"
            )

    def start(self, order: Order) -> str:
        """Make Secret and Job, or leave the manifest and the code as files."""
        if not self._is_applied:
            return self._shown(order)
        self._has_begun = True
        done = self._kubectl("create", "-f", "-", text=self._all(order.code.encode()))
        if done.returncode:
            raise ConfigError(f"the cluster did not take the Job: {last_line(done.stderr)}")
        return f"Kubernetes has the Job {self.mark} ({self._wish.pods} pods of the image {self._wish.image})"

    def _shown(self, order: Order) -> str:
        import yaml

        code = self.leave_code(order)
        path = code.with_suffix(".yaml")
        manifest = yaml.safe_dump(job_of(self.mark, self._wish), sort_keys=False)
        path.write_text(manifest, encoding="utf-8")
        self._files = [code, path]
        where = "".join(f" {shlex.quote(word)}" for word in self._where)
        return (
            f"To start the workers, where kubectl knows your cluster:\n"
            f"    kubectl{where} create secret generic {self.mark} --from-file={shlex.quote(f'join-code={code}')}\n"
            f"    kubectl{where} create -f {shlex.quote(str(path))}\n"
            f"and to end them: kubectl{where} delete job,secret {self.mark}. The manifest, in which no secret is:\n{manifest}"
        )

    def _all(self, code: str) -> str:
        items = [secret_of(self.mark, code), job_of(self.mark, self._wish)]
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})

    def follow(self, code: JoinCode) -> None:
        """Put the new code into the Secret; the kubelet brings it into the pods."""
        if self._has_begun:
            self._kubectl("replace", "-f", "-", text=json.dumps(secret_of(self.mark, code.encode())))

    def look(self) -> str:
        """Each change of the Job's state."""
        if not self._has_begun or self._over or time.monotonic() - self._looked < LOOK_S:
            return ""
        self._looked = time.monotonic()
        job = self._kubectl("get", "job", self.mark, "-o", "json", "--ignore-not-found")
        pods = self._kubectl("get", "pods", "-l", label_of(self.mark), "-o", "json")
        if job.returncode or pods.returncode:
            return ""
        before, self._state = self._state, _state_of(job.stdout, pods.stdout)
        if _is_over(job.stdout):
            self._over = f"Kubernetes' Job {self.mark} is over: {self._state}"
            return self._over
        return f"Kubernetes' Job {self.mark}: {self._state}" if self._state != before else ""

    def failure(self) -> str:
        """Why no worker comes any more."""
        return self._over

    def end(self) -> str:
        """Delete what carries the mark; of a manifest that was only shown, the files here."""
        if not self._is_applied:
            for path in self._files:
                remove_secret(path)
            return ""
        done = self._kubectl("delete", "job,secret", "-l", label_of(self.mark), "--wait=false", "--ignore-not-found")
        return f"kubectl could not delete it: {last_line(done.stderr)}" if done.returncode else ""

    def _kubectl(self, *words: str, text: str = "") -> Any:
        return run_program([find_program("kubectl", _WAY), *self._where, *words], text)


def _is_over(job: str) -> bool:
    if not job.strip():  # it was deleted by hand
        return True
    conditions = json.loads(job).get("status", {}).get("conditions") or []
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions)


def _state_of(job: str, pods: str) -> str:
    """How many pods run, and what keeps the others."""
    if not job.strip():
        return "it was deleted"
    found = json.loads(pods).get("items") or []
    phases = [pod.get("status", {}).get("phase", "Pending").lower() for pod in found]
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))) or "no pod yet"
    whys = sorted({why for pod in found if (why := _why_waiting(pod))})
    return counts + "".join(f"; {why}" for why in whys[:3])


def _why_waiting(pod: dict[str, Any]) -> str:
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {' '.join(str(waiting.get('message', '')).split())[:200]}"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return " ".join(str(condition.get("message", "")).split())[:200]
    return ""
