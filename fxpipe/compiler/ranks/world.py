"""The ranks that a pipeline is compiled for, and the places of its stages on them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.ir._torch import timeout_of


@dataclass(frozen=True)
class Ranks:
    """The processes that a pipeline runs in: the ranks of a process group, each with one device.

    Args:
        group: the ranks that have the stages.
        device: this process's.
        replicas: the group of the ranks that have the same stages in other replicas of the
            pipeline, which train on other rows; None if there is one replica.
        parts: the group of the ranks that have the same stages, and other parts of their
            parameters; None if parameters are not in parts (tensor parallelism).
        members: the ranks of all replicas, or parts, one after the other, by their numbers in the
            default group.
    """

    group: dist.ProcessGroup
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    members: tuple[int, ...] = ()
    parts: dist.ProcessGroup | None = None

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for another one: the timeout of the process group."""
        return timeout_of(self.group, self.device)

    @staticmethod
    def of(given: Any) -> Ranks | None:
        """The ranks that are given to :func:`fxpipe.compile` in place of devices; None if devices
        are given.

        Raises ValueError for a mesh whose dimension for stages is not clear, or a group without
        this process.
        """
        if not dist.is_available():
            return None
        replicas, parts, members = None, None, list[int]()
        if isinstance(given, DeviceMesh):
            stages, other = _dimensions(given)
            group, kind = given.get_group(stages), given.device_type
            if other is not None:
                beside = given.get_group(other)
                is_in_parts = (given.mesh_dim_names or ())[other] == "tp"
                replicas, parts = (None, beside) if is_in_parts else (beside, None)
                members = given.mesh.movedim(stages, -1).flatten().tolist()
        elif isinstance(given, dist.ProcessGroup):
            group, kind = given, _device_type(given)
        else:
            return None
        if dist.get_rank(group) < 0:
            raise ValueError("this process is no rank of the group: only its ranks compile for it")
        device = torch.device(kind)
        if kind != "cpu":
            device = torch.device(kind, torch.accelerator.current_device_index())
        members = members or dist.get_process_group_ranks(group)
        return Ranks(group, device, replicas, tuple(members), parts)

    @property
    def devices(self) -> list[torch.device]:
        """One device for each rank. A rank uses no device but its own, so that its own device
        stands for every rank's."""
        return [self.device] * dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return dist.get_rank(self.group)

    @property
    def is_alone(self) -> bool:
        """Whether there are neither replicas nor parts: no collective has to do with any rank
        beside those that have the stages."""
        return self.replicas is None and self.parts is None

    @property
    def names(self) -> list[str]:
        """For messages, how each member is called: "rank 1 of replica 0", say."""
        size = dist.get_world_size(self.group)
        if self.is_alone:
            return [f"rank {rank}" for rank in range(size)]
        what = "replica" if self.parts is None else "part"
        return [f"rank {i % size} of {what} {i // size}" for i in range(len(self.members))]

    @property
    def this_replica(self) -> slice:
        """The ranks of this replica, or of this part, among all members."""
        size = dist.get_world_size(self.group)
        first = self.members.index(dist.get_rank()) // size * size
        return slice(first, first + size)


def _dimensions(mesh: DeviceMesh) -> tuple[int, int | None]:
    """The dimension of a mesh along which the stages are, and the other one, if there is one.

    Raises ValueError if that is not clear.
    """
    if mesh.ndim == 1:
        return 0, None
    names = list(mesh.mesh_dim_names or ())
    if mesh.ndim == 2 and names.count("pp") == 1:
        stages = names.index("pp")
        return stages, 1 - stages
    raise ValueError(
        f"the mesh has the dimensions {tuple(names) or mesh.ndim}: give the one along which the "
        'stages are, such as mesh["pp"]; or two, of which one is called "pp", and the other one '
        '"tp", for parts of the same parameters, or otherwise, for replicas that train on other '
        "rows"
    )


def _device_type(group: dist.ProcessGroup) -> str:
    """The type of the devices that a group is for: that of the accelerator, unless the group talks
    by gloo."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend(group) == "gloo":
        return "cpu"
    return accelerator.type
