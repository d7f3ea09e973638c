"""The arithmetic of dividing workers and layers, with the numbers in every refusal.

Ranks are laid out data-major: tensor groups are neighbours, then the stages of one pipeline, then the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from guava_nb.errors import ConfigError, MeshError

__all__ = ["Mesh", "divide_layers", "largest_divisor", "make_mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the three axes; their product is the number of workers."""

    data: int
    stages: int
    tensor: int

    @property
    def size(self) -> int:
        """Workers that the mesh needs."""
        return self.data * self.stages * self.tensor

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return rank // self.tensor % self.stages

    def __str__(self) -> str:
        """As the refusals show it: "dp 2 x pp 2 x tp 2"."""
        return f"dp {self.data} x pp {self.stages} x tp {self.tensor}"


def make_mesh(num_workers: int, data: int | None, stages: int | None, tensor: int) -> Mesh:
    """Fill the sizes that were left open from the number of workers.

    Args:
        num_workers: workers that are here.
        data: replicas; None takes what the stages leave.
        stages: pipeline stages; None takes what the replicas leave, all of it when `data` is None too.
        tensor: workers that share each layer.

    Raises:
        MeshError: the product is not the number of workers; the message says what to do.
    """
    rest = max(1, num_workers // tensor)
    if stages is None:
        stages = max(1, rest // (data or 1))
    if data is None:
        data = max(1, rest // stages)
    mesh = Mesh(data, stages, tensor)
    if mesh.size != num_workers:
        here = "1 is here" if num_workers == 1 else f"{num_workers} are here"
        needs = "1 worker" if mesh.size == 1 else f"{mesh.size} workers"
        raise MeshError(f"{mesh} needs {needs}, {here}", _advice(mesh, num_workers), mesh.size - num_workers)
    return mesh


def _advice(mesh: Mesh, num_workers: int) -> str:
    missing = mesh.size - num_workers
    if missing > 0:
        return f"start {missing} more with %guava_worker elsewhere, or here with %guava_up --local (launch_workers in a script)"
    many = "1 worker" if missing == -1 else f"{-missing} workers"
    return (
        f"choose axes that make {num_workers}, such as {_fitting(mesh, num_workers)}, leave one of them out, or let {many} "
        "leave (%guava_stop in the notebook there)"
    )


def _fitting(mesh: Mesh, num_workers: int) -> Mesh:
    """A mesh of so many workers that differs from this one in one axis, if there is one."""
    for axis in ("data", "stages", "tensor"):
        others = mesh.size // getattr(mesh, axis)
        if num_workers % others == 0:
            return replace(mesh, **{axis: num_workers // others})
    return Mesh(num_workers, 1, 1)


def divide_layers(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Return [start, end) of each stage; sizes differ by one at most, the longer ones come first.

    Raises:
        ConfigError: a stage would be empty.
    """
    if num_layers < num_stages:
        raise ConfigError(f"n_layers {num_layers} cannot fill {num_stages} stages; use at most {num_layers} stages")
    base, longer = divmod(num_layers, num_stages)
    starts = [stage * base + min(stage, longer) for stage in range(num_stages + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is not above `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)
