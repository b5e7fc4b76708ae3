"""Ranks without processes: each a thread, and every transmit waits for its receive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import fx

from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from fxpipe.runtime.ranks.transport import Edge

PATIENCE = 60.0  # seconds after which a rank that waits is taken to wait forever


class _Met:
    """Where the two ends of an edge meet, one transfer at a time."""

    def __init__(self) -> None:
        self.values: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.taken: SimpleQueue[int] = SimpleQueue()


class _Here:
    def __init__(self, values: Any) -> None:
        self.wait = lambda: values


class Meeting:
    """A transport on which a transmit ends when its receive has come, and a receive likewise."""

    def __init__(self, ranks: int) -> None:
        self.edges: dict[Edge, _Met] = {
            (a, b): _Met() for a in range(ranks) for b in range(ranks) if a != b
        }

    def transmit(self, values: Any, edge: Edge, number: int) -> None:
        self.edges[edge].values.put((number, values))
        assert self.edges[edge].taken.get(timeout=PATIENCE) == number

    def receive(self, edge: Edge, number: int) -> _Here:
        found, values = self.edges[edge].values.get(timeout=PATIENCE)
        assert found == number
        self.edges[edge].taken.put(number)
        return _Here(values)


def played(graphs: Sequence[fx.GraphModule], values: Sequence[Any]) -> list[Any]:
    """Run the graphs of all ranks side by side. Returns what each returns."""
    transport, results = Meeting(len(graphs)), [None] * len(graphs)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        torch.get_num_threads()  # at its first call in a thread PyTorch sets the process's number
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                results[rank] = run_inline(lower(graphs[rank]), [transport, *values])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(graphs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, Empty)):
        raise error  # one that only waited in vain comes last
    return results
