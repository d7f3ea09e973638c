"""Who stands where: three axes over the ranks of the default process group.

Ranks are laid out data-major, rank = (dp * PP + pp) * TP + tp, so that the ranks which share each layer, and talk most,
are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from guava_nb.config.mesh import Mesh
from guava_nb.errors import ConfigError

__all__ = ["AXES", "MeshAxes"]

AXES = ("dp", "pp", "tp")


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
    def build(cls, sizes: Mesh, device: torch.device) -> MeshAxes:
        """Lay the mesh over the default group; every rank of it calls this at the same time.

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
