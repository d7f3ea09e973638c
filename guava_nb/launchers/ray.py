"""Workers on a Ray cluster: one actor for each, in a placement group, with `guava worker` as a process of its own below it."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from guava_nb.errors import ConfigError
from guava_nb.launchers.launcher import Launcher, Order
from guava_nb.launchers.ray_actor import WorkerActor
from guava_nb.protocol.joincode import JoinCode

__all__ = ["RayLauncher"]

#: Seconds for an actor that runs to answer, and for workers to leave.
ANSWER_S, LEAVE_S = 60.0, 10.0


class RayLauncher(Launcher):
    """`ray:N[,gpus=G][,cpus=C][,address=HOST:PORT]`; the notebook's Python must be of Ray's version, as Ray demands."""

    name = "ray"
    example = "ray:8,gpus=1"
    options: ClassVar = {
        "gpus": "GPUs of each worker; 1 where the cluster has any",
        "cpus": "processors of each worker (1)",
        "address": "of the cluster (auto: RAY_ADDRESS, or the one that this machine belongs to); local starts one here",
    }
    is_prompt = False

    def __init__(self, what: str) -> None:
        super().__init__(what)
        words, found = self.read(what)
        self.count = self.read_count(words)
        self._gpus = self.read_number(found, "gpus", 0) if "gpus" in found else None
        self._cpus = self.read_number(found, "cpus", 1)
        self._address = found.get("address", "auto")
        self._group: Any = None
        self._actors: list[Any] = []
        self._began: set[int] = set()
        self._told: dict[int, str] = {}
        self._code = ""
        self._is_ours = False

    def check(self) -> None:
        """Whether Ray is here, its cluster answers, and could ever hold these workers."""
        try:
            import ray
        except ImportError as problem:
            raise ConfigError(f"there is no Ray in this Python ({problem}): python -m pip install ray") from problem
        if not ray.is_initialized():
            address = None if self._address == "local" else self._address
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace=self.mark)
            except (ConnectionError, RuntimeError, ValueError) as problem:
                raise ConfigError(
                    f"Ray's cluster at {self._address} does not answer ({' '.join(str(problem).split())[:200]}): start it (ray "
                    "start --head), name it (address=HOST:6379), or say address=local"
                ) from problem
            self._is_ours = True
        total = ray.cluster_resources()
        if self._gpus is None:
            self._gpus = int(total.get("GPU", 0) >= 1)
        for kind, each in (("CPU", self._cpus), ("GPU", self._gpus)):
            if each * self.count > total.get(kind, 0):
                raise ConfigError(
                    f"{self.count} workers with {each} {kind} each need {each * self.count}, and Ray's cluster has "
                    f"{total.get(kind, 0):g}: ask for fewer, or say cpus= and gpus="
                )

    def start(self, order: Order) -> str:
        """Ask for the placement group; workers begin when Ray has room for them."""
        import ray
        from ray.util.placement_group import placement_group

        self._code = order.code.encode()
        needs = {"CPU": self._cpus, **({"GPU": self._gpus} if self._gpus else {})}
        self._group = placement_group([needs] * self.count, name=self.mark)
        kind: Any = ray.remote(WorkerActor)
        for number in range(self.count):
            self._actors.append(
                kind.options(
                    num_cpus=self._cpus, num_gpus=self._gpus or 0, max_restarts=-1, name=f"{self.mark}-{number}",
                    max_concurrency=4, scheduling_strategy=self._in_group(number),
                ).remote(self.mark)
            )  # fmt: skip
        return f"Ray has {self.count} actors {self.mark}-0 and up; each starts a worker when there is room"

    def _in_group(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)

    def follow(self, code: JoinCode) -> None:
        """Say the new code to all; those that start later get it too."""
        self._code = code.encode()
        for actor in self._actors:
            actor.say.remote(self._code)

    def look(self) -> str:
        """Have each actor that is new, or was started anew elsewhere, start its worker; gives what is news of the others."""
        import ray

        asked = {actor.begin.remote(self._code): number for number, actor in enumerate(self._actors)}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1.0) if asked else ([], [])
        news = [self._heard(asked[one], one) for one in done]
        return "; ".join(filter(None, news))

    def _heard(self, number: int, answer: Any) -> str:
        import ray

        name = f"{self.mark}-{number}"
        try:
            status, lines, is_new = ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.RayError as problem:
            said = f"Ray's actor {name} is away: {type(problem).__name__}; Ray starts it anew where there is room"
        else:
            again = is_new and number in self._began
            self._began.add(number)
            said = f"the worker of Ray's actor {name} was started anew" if again else self._ended(name, status, lines)
        is_news = bool(said) and self._told.get(number) != said
        self._told[number] = said
        return said if is_news else ""

    @staticmethod
    def _ended(name: str, status: int | None, lines: list[str]) -> str:
        if status is None:
            return ""
        return (
            f"the worker of Ray's actor {name} ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
        )

    def end(self) -> str:
        """Let the workers leave, then take actors and placement group back, and what was begun for them."""
        if self._group is None and not self._actors:  # of a process that is gone: Ray ended its actors with it
            return ""
        import ray
        from ray.util.placement_group import remove_placement_group

        actors, self._actors = self._actors, []
        with contextlib.suppress(Exception):  # whatever is lost of it is ended below
            ray.wait([actor.finish.remote(LEAVE_S) for actor in actors], num_returns=len(actors), timeout=LEAVE_S + 2)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)
        self._group = None
        if self._is_ours:
            ray.shutdown()
        return ""
