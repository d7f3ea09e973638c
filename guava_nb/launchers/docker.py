"""Workers in containers of this machine's Docker, or of the one that its client is set to."""

from __future__ import annotations

import sys
import time
from typing import ClassVar

from guava_nb.config.version import installed_version
from guava_nb.errors import ConfigError
from guava_nb.launchers.attached_process import AttachedProcess
from guava_nb.launchers.install_check import FACTS, IMAGE, PythonThere, facts_in, own_image
from guava_nb.launchers.launcher import Launcher, Order, worker_words
from guava_nb.launchers.programs import find_program, last_line, run_program
from guava_nb.protocol.joincode import JoinCode

__all__ = ["DockerLauncher"]

LABEL = "guava-nb.start"
CHECK_S, LEAVE_S = 120.0, 10.0
#: Begin the line on Docker's own help that ends what `docker run` says.
_HINTS = ("See 'docker", "Run 'docker")
#: By this name a container reaches the machine that Docker Desktop runs on.
_HOST = "host.docker.internal"


class DockerLauncher(Launcher):
    """`docker:N[,image=IMAGE][,gpus=G][,python=PATH]`: container K gets the GPUs from K x G on."""

    name = "docker"
    example = "docker:2,image=registry.example/guava:1"
    options: ClassVar = {
        "image": IMAGE,
        "gpus": "GPUs of each container (0)",
        "python": "the Python in the image (python)",
    }
    needs_address = False  # containers share this machine's network where the session is on its loopback

    def __init__(self, what: str) -> None:
        super().__init__(what)
        words, found = self.read(what)
        self._containers = self.read_count(words)
        self._image, self._python = found.get("image") or own_image(), found.get("python", "python")
        if self._image.startswith("-"):  # docker would take it for an option
            raise ConfigError(f"--on docker: {self._image!r} is no image")
        self._gpus = self.read_number(found, "gpus", 0)
        self.count = self._containers * max(1, self._gpus)
        self._workers: list[AttachedProcess] = []
        self._told: set[int] = set()
        self._host = ""

    def check(self) -> None:
        """Whether Docker answers, and what the Python of the image has."""
        docker = self._docker()
        answer = run_program([docker, "version", "--format", "{{.Server.Version}}"])
        if answer.returncode:
            raise ConfigError(f"Docker does not answer: {last_line(answer.stderr)}")
        words = [docker, "run", "--rm", "--label", f"{LABEL}={self.mark}", *self._in_image([self._python, "-c", FACTS])]
        try:
            done = run_program(words, limit_s=CHECK_S)
        except ConfigError as late:
            raise ConfigError(f"{late}. A large image takes longer to come: docker pull {self._image} first") from late
        found: PythonThere | None = facts_in(done.stdout)
        if found is None:
            raise ConfigError(
                f"the image {self._image} does not run {self._python}: {_said_last(done.stderr)}. Name one, image=IMAGE, or "
                f"build it: FROM an image with torch, RUN python -m pip install guava-nb=={installed_version()}"
            )
        if problem := found.missing(
            self._image, "in its Dockerfile  RUN python -m pip install", "; or name another image"
        ):
            raise ConfigError(problem)

    def start(self, order: Order) -> str:
        """Start the containers; the join code goes through their standard input."""
        network: list[str] = []
        if not order.is_reached_from_elsewhere and sys.platform == "linux":
            network = ["--network", "host"]
        elif not order.is_reached_from_elsewhere:
            self._host = _HOST
        for number in range(self._containers):
            worker = AttachedProcess(self._words(number, network))
            self._workers.append(worker)
            worker.say(self._code_for(order.code))
        return f"started {self._containers} container{'' if self._containers == 1 else 's'} of {self._image}"

    def _words(self, number: int, network: list[str]) -> list[str]:
        """An init process in the container reaps what user code leaves behind, and passes SIGTERM on."""
        first = number * self._gpus
        devices = ",".join(str(gpu) for gpu in range(first, first + self._gpus))
        return [
            self._docker(), "run", "--rm", "--interactive", "--init", "--label", f"{LABEL}={self.mark}", "--ipc=host",
            "--name", f"{self.mark}-{number}", *network, *(["--gpus", f'"device={devices}"'] if self._gpus else []),
            *self._in_image(worker_words(self._python, "-", self.mark, gpus="auto")),
        ]  # fmt: skip

    def _in_image(self, command: list[str]) -> list[str]:
        """Words that run this command and not what the image starts by itself, as `guava worker` of our own."""
        return ["--entrypoint", command[0], self._image, *command[1:]]

    def _code_for(self, code: JoinCode) -> str:
        return (code.with_address(self._host, code.port) if self._host else code).encode()

    def follow(self, code: JoinCode) -> None:
        """Say the new code to all."""
        for worker in self._workers:
            worker.say(self._code_for(code))

    def look(self) -> str:
        """Containers that have ended, each told once."""
        ended = [k for k, worker in enumerate(self._workers) if worker.status() is not None and k not in self._told]
        self._told.update(ended)
        return "; ".join(self._ended(k) for k in ended)

    def failure(self) -> str:
        """Why none is left."""
        if any(worker.status() is None for worker in self._workers):
            return ""
        return "; ".join(self._ended(k) for k in range(len(self._workers)))

    def _ended(self, number: int) -> str:
        worker, name = self._workers[number], f"container {self.mark}-{number}"
        if worker.status() == 0:
            return f"the worker in {name} has left"
        return f"{name} ended with status {worker.status()}: {_said_last(chr(10).join(worker.said()))}"

    def end(self) -> str:
        """Let the workers leave, and remove the containers that carry the mark."""
        for worker in self._workers:
            worker.say("leave")
        until = time.monotonic() + LEAVE_S
        for worker in self._workers:
            worker.wait(max(0.0, until - time.monotonic()))
        found = run_program([self._docker(), "ps", "--all", "--quiet", "--filter", f"label={LABEL}={self.mark}"])
        problem = last_line(found.stderr) if found.returncode else ""
        if names := found.stdout.split():
            done = run_program([self._docker(), "rm", "--force", *names])
            problem = last_line(done.stderr) if done.returncode and "No such container" not in done.stderr else problem
        for worker in self._workers:
            worker.close()
        return f"its containers could not be removed: {problem}" if problem else ""

    @staticmethod
    def _docker() -> str:
        return find_program("docker", "install Docker, or Podman with its docker command")


def _said_last(text: str) -> str:
    return last_line("\n".join(line for line in text.splitlines() if not line.startswith(_HINTS)))
