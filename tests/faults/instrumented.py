"""Programs whose nodes call a function of a test's ahead of what they do, in whichever lane they
run, and ahead of their backward, in the thread of autograd's that runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import MICROBATCH
from fxpipe.runtime import program

Watch = Callable[[str, int], None]
"""``watch(place, microbatch)``: the place is the name of an operation, such as "copy" or, in an
autograd graph, "copy, backward". The micro-batch is -1 where an operation has none."""


@contextmanager
def instrumented(watch: Watch) -> Iterator[None]:
    """Pipelines that are compiled within this context call ``watch`` at each of their nodes."""
    plain = program._function

    def function(gm: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
        called = plain(gm, node)
        if node.op in ("output", "get_attr"):
            return called
        number = node.meta.get(MICROBATCH, -1)
        name = "stage" if node.op == "call_module" else inspect.unwrap(node.target).__name__

        def watched(*args: Any, **kwargs: Any) -> Any:
            watch(name, number)
            result = called(*args, **kwargs)
            for edge in {t.grad_fn for t in pytree.tree_leaves(result) if _has_node(t)}:
                edge.register_prehook(lambda grads: watch(f"{name}, backward", number))
            return result

        return called if name == "getitem" else watched

    with mock.patch.object(program, "_function", function):
        yield


def _has_node(value: Any) -> bool:
    return type(value) is Tensor and value.grad_fn is not None and torch.is_grad_enabled()
