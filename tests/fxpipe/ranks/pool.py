"""Four processes that talk by gloo and stay for all tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
# After this time a rank that waits for another one raises an error.
TIMEOUT = timedelta(seconds=float(os.environ.get("FXPIPE_TEST_PATIENCE", "150")))


class Failed(Exception):
    """A job that has failed on some ranks; ``errors`` has theirs, as text, or None."""

    def __init__(self, errors: list[str | None]) -> None:
        super().__init__("\n".join(error for error in errors if error))
        self.errors = errors


class Pool:
    """The processes. A job is a function of a process group and of what else it is given, which
    all ranks of the group run at the same time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            here, there = context.Pipe()
            args = rank, f"file://{self._folder.name}/store", there
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(here)

    def run(self, job: Callable[..., Any], *args: Any, ranks: int = SIZE, **kwargs: Any) -> Any:
        """What each of the first ``ranks`` processes returns.

        Raises :class:`Failed` if one has raised an error.
        """
        return self.begin(job, *args, ranks=ranks, **kwargs)()

    def begin(
        self, job: Callable[..., Any], *args: Any, ranks: int = SIZE, **kwargs: Any
    ) -> Callable[[], list[Any]]:
        """Let the processes begin a job. What is returned has to be called once: it waits for them,
        and does as :meth:`run`."""
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((job, ranks, args, kwargs)))

        def results() -> list[Any]:
            every = [pickle.loads(connection.recv_bytes()) for connection in self._connections]
            errors = [error for _, error in every]
            if any(errors):
                raise Failed(errors)
            return [result for result, _ in every[:ranks]]

        return results

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even if it hangs in a collective then."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _serve(rank: int, store: str, connection: Connection) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    groups = {SIZE: dist.group.WORLD}
    while True:
        try:
            job, ranks, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(range(ranks)), timeout=TIMEOUT)
        try:
            answer = (job(groups[ranks], *args, **kwargs) if rank < ranks else None), None
        except BaseException:
            answer = None, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
