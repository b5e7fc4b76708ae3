"""When the tensors and the function of a checkpoint are freed."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint_cases.functions import chain
from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


def _alive(c: Checkpoint, when: str) -> Any:
    refs: list[weakref.ref[Any]] = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()
        refs.extend(weakref.ref(t.untyped_storage()) for t in (y, z))
        return z.cos()

    x = leaf(1000)
    y = c(fn, x)
    if when == "after the forward":
        return x.sum(), sum(ref() is not None for ref in refs) if c.kind != "plain" else 0
    if when == "after the backward, retained":
        y.sum().backward(retain_graph=True)
    elif when == "after a part of the backward":
        torch.autograd.grad(y.sum(), y, retain_graph=True)
    elif when == "after the graph is dropped":
        y = None
    else:
        y.sum().backward()
    alive = sum(ref() is not None for ref in refs)
    return x.sum(), alive if c.kind != "plain" else 0


CASES += [
    Case(f"alive {when}", functools.partial(_alive, when=when), memory=False)
    for when in (
        "after the forward",
        "after the backward",
        "after the backward, retained",
        "after a part of the backward",
        "after the graph is dropped",
    )
]


@case(memory=False)
def the_function_is_let_go(c: Checkpoint) -> Any:
    """Without the garbage collector, the function is let go when the graph is."""

    class Thing:
        pass

    def checkpointed() -> tuple[Tensor, weakref.ref[Thing]]:
        thing = Thing()
        return c(lambda x: (thing, x.sin().exp())[1], leaf(3)), weakref.ref(thing)

    y, ref = checkpointed()
    gc.collect()
    gc.disable()
    try:
        y = y.sum().detach()
        return ref() is None
    finally:
        gc.enable()


@case(memory=False)
def two_threads_one_graph(c: Checkpoint) -> Any:
    """Two threads go back through one graph at once, nested."""
    x = leaf(50)
    loss = c(lambda x: c(chain, x.sin()).exp(), x).sum()
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        (found[i],) = torch.autograd.grad(loss, x, retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    c.calls = 0  # by chance
    return found[0], found[1]
