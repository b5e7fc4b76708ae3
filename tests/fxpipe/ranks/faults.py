"""What the other ranks say when one of four has a fault, and how soon they end.

    python -m tests.fxpipe.ranks.faults             # 4 faults x 3 places x 3 micro-batches
    python -m tests.fxpipe.ranks.faults SIGSTOP     # those of one kind

Rank 1 raises an error, exits, is killed or is stopped, in the forward or backward of its stage or
ahead of its transfer to rank 2, for the first, middle or last micro-batch. The process group waits
for 15 seconds, which is how long it takes to find a rank that is stopped. Then all ranks are
started again, and train on from the last checkpoint. The losses are compared, bit by bit, with
those of a loop over the micro-batches without a pipeline.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fxpipe.ranks.restarted import (
    CHUNKS,
    FAULTY_RANK,
    TIMEOUT,
    Fault,
    expected_losses,
    losses_in,
    main,
)

KINDS, PLACES = ("raise", "exit", "SIGKILL", "SIGSTOP"), ("forward", "backward", "transfer")
SIZE = 4
PATIENCE = 120.0  # seconds for a rank that has been started again
BOUND = 3 * TIMEOUT.total_seconds()  # seconds after which a rank is taken to hang


@dataclass
class Ended:
    """How the other ranks have ended: how long after the fault, and with which error each; and
    the losses of all steps, if the ranks have been started again."""

    seconds: float
    said: dict[int, str]
    losses: list[str]

    @property
    def blamed(self) -> list[int]:
        """The rank that each error names first, beside the one that raises it."""
        pattern = r"(?:has lost |RankError: |LostRank: )rank (\d)(?! has lost)"
        found = [re.search(pattern, text) for text in self.said.values()]
        return [int(each[1]) if each else -1 for each in found]


def _process(rank: int, folder: str, fault: Fault, attempt: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stderr = io.StringIO()  # the error is in the folder
    store = f"file://{folder}/store_{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    main(Path(folder), fault, attempt)


@contextmanager
def _started(folder: str, fault: Fault, attempt: int) -> Iterator[list[Any]]:
    """The processes of all ranks, which are killed in the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fxpipe.ranks.restarted"])
    processes = [
        context.Process(target=_process, args=(rank, folder, fault, attempt))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended(fault: Fault, is_restarted: bool = False) -> Ended:
    """Let the fault happen, and wait for the other ranks. Then train on, if ``is_restarted``."""
    with tempfile.TemporaryDirectory() as folder:
        with _started(folder, fault, 0) as processes:
            others = [process for rank, process in enumerate(processes) if rank != FAULTY_RANK]
            while any(process.is_alive() for process in others) and not _is_over(folder):
                time.sleep(0.05)
            seconds = time.time() - float((Path(folder) / "fault").read_text())
        if is_restarted:
            with _started(folder, fault, 1) as processes:
                for process in processes:
                    process.join(PATIENCE)
        said = {rank: Path(folder, f"error_0_{rank}") for rank in range(SIZE)}
        return Ended(
            seconds,
            {
                rank: path.read_text() if path.exists() else "(nothing)"
                for rank, path in said.items()
                if rank != FAULTY_RANK
            },
            losses_in(Path(folder)),
        )


def _is_over(folder: str) -> bool:
    """Whether a fault has happened so long ago that a rank that still runs hangs."""
    path = Path(folder) / "fault"
    return path.exists() and time.time() - path.stat().st_mtime > BOUND


def faults(kinds: tuple[str, ...] = KINDS) -> Iterator[Fault]:
    """All faults of these kinds."""
    for kind, where, microbatch in product(kinds, PLACES, range(CHUNKS)):
        yield Fault(kind, where, microbatch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    expected = expected_losses(SIZE)
    columns = ("all have ended after", "they name rank", "losses after a restart", "rank 0 says")
    print("| fault | place | micro-batch |", " | ".join(columns), "|")
    print("|---|---|---|---|---|---|---|")
    for fault in faults(tuple(sys.argv[1:]) or KINDS):
        found = ended(fault, is_restarted=True)
        first = " ".join(found.said[0].replace(str(Path.cwd()), "").split())
        names = ", ".join(map(str, sorted(set(found.blamed))))
        losses = "the same" if found.losses == expected else str(found.losses)
        where = fault.kind, fault.where, fault.microbatch
        row = (*where, f"{found.seconds:.1f} s", names, losses, first)
        print("|", " | ".join(map(str, row)), "|", flush=True)
