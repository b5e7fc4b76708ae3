"""Process groups beside those of the user, made by the ranks that are in them and no others.

PyTorch names a group that only its own ranks make (``use_local_synchronization``) by the number of
groups that the process is in. Ranks where that number differs would give one group different names,
and wait for each other until the store gives up. So they first come to the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.ir._torch import number_of_groups


def host_group(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of the same ranks that talks by gloo: the given group, or else a new one.

    All ranks of the group have to call this at the same time. ``timeout`` is for the new group.
    """
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = new_group(ranks, "gloo", timeout, [group], device)
    return made


def new_group(
    ranks: Sequence[int],
    backend: str | None,
    timeout: timedelta,
    known: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Any:
    """A new process group of these ranks, which no other process takes part in making.

    Args:
        backend: None: that of the default group.
        known: groups that connect these ranks: the group of them all, or those of the dimensions of
            a mesh of them, one after the other.
        device: where tensors for the known groups are put.
    """
    if len(ranks) == dist.get_world_size():
        return dist.new_group(list(ranks), timeout=timeout, backend=backend)
    count = number_of_groups()
    for group in known:
        by_host = dist.get_backend(group) == "gloo"
        most = torch.tensor(count, device="cpu" if by_host else device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        count = int(most)
    while number_of_groups() < count:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
