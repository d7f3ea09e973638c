"""Who stands where: three axes over the ranks of the default process group.

Ranks are laid out data-major, rank = (dp * PP + pp) * TP + tp, so that the ranks which share each layer, and talk most,
are neighbours. Axes that do not leave a machine with several GPUs go over NCCL there, while the default group carries
the others: a group in Python cannot hand some of its calls to another backend, but a mesh may have groups of its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from guava_nb.config.mesh import Mesh
from guava_nb.errors import ConfigError

__all__ = ["AXES", "MeshAxes", "axes_inside"]

AXES = ("dp", "pp", "tp")
#: For one operation: who is lost is known by other means, and others may compile or page for minutes.
_TIMEOUT = datetime.timedelta(seconds=1800)


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """This rank's place on the mesh and its groups along every axis.

    Attributes:
        sizes: number of replicas, stages and ranks that share a layer.
        devices: torch's mesh with the axes "dp", "pp", "tp".
        dp: index of this rank's replica.
        pp: index of its stage.
        tp: index among the ranks that share each layer.
    """

    sizes: Mesh
    devices: DeviceMesh
    dp: int
    pp: int
    tp: int

    @classmethod
    def build(cls, sizes: Mesh, device: torch.device, machines: Sequence[int] = (), inner: str = "nccl") -> MeshAxes:
        """Lay the mesh over the default group; every rank of it calls this at the same time.

        Args:
            sizes: of the axes.
            device: of this rank.
            machines: number of the machine of every rank, where those of one machine shall have groups of their own.
            inner: backend of these.

        Raises:
            ConfigError: the group has another number of ranks than the mesh needs.
        """
        ranks = dist.get_world_size()
        if sizes.size != ranks:
            here = "1 is here" if ranks == 1 else f"{ranks} are here"
            raise ConfigError(f"{sizes} needs {sizes.size} workers, {here}")
        if device.type == "cuda":
            # Otherwise DeviceMesh picks a device by rank, which is wrong where every machine has its own cuda:0.
            torch.cuda.set_device(device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        inside = axes_inside(sizes, machines)
        # Where an axis takes all ranks, torch's own mesh takes the default group for it. gloo's sends and receives keep the
        # timeout that their group was met with, and that of the default group is a short one, for the meeting: stages need more.
        if inside or (sizes.stages > 1 and dist.get_backend() == "gloo"):
            devices = _mixed(sizes, device, inside, inner)
        else:
            devices = init_device_mesh(device.type, (sizes.data, sizes.stages, sizes.tensor), mesh_dim_names=AXES)
        return cls(sizes, devices, *(devices.get_local_rank(axis) for axis in AXES))

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return {"dp": self.sizes.data, "pp": self.sizes.stages, "tp": self.sizes.tensor}[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one along `axis` only."""
        return self.devices.get_group(axis)

    def axis(self, name: str) -> DeviceMesh:
        """Return torch's mesh of one axis."""
        return self.devices[name]


def axes_inside(sizes: Mesh, machines: Sequence[int]) -> tuple[str, ...]:
    """Return the axes along which ranks differ and never leave their machine.

    Args:
        machines: number of the machine of every rank; empty or all the same: none, since the whole group is alike then.
    """
    if len(set(machines)) < 2:
        return ()
    places = torch.tensor(machines).reshape(sizes.data, sizes.stages, sizes.tensor)
    return tuple(
        axis
        for dim, axis in enumerate(AXES)
        if places.shape[dim] > 1 and bool((places == places.narrow(dim, 0, 1)).all())
    )


def _mixed(sizes: Mesh, device: torch.device, inside: Sequence[str], inner: str) -> DeviceMesh:
    """A mesh of groups of its own: axes `inside` have the backend `inner`, the others that of the default group."""
    ranks = torch.arange(sizes.size).reshape(sizes.data, sizes.stages, sizes.tensor)
    mine = []
    for dim, axis in enumerate(AXES):
        backend = inner if axis in inside else None
        for members in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist():  # every rank makes all, in order
            group = dist.new_group(members, timeout=_TIMEOUT, backend=backend)
            if dist.get_rank() in members:
                mine.append(group)
    return DeviceMesh.from_group(mine, device.type, ranks, mesh_dim_names=AXES)
