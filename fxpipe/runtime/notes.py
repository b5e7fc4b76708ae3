"""Notes on exceptions: at which stage, micro-batch, node and line of the model one was raised, and
what has spoilt a backward by writing in place: a loss to its target, or the model to its state."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from fxpipe.ir.graph import CONTAINS, MICROBATCH, STAGE, WRITES_STATE, attribute
from fxpipe.ir.printing import format_node
from fxpipe.ir.source import model_frame
from fxpipe.ir.tensors import tensors_of
from fxpipe.ir.text import shortened
from fxpipe.runtime.writes import writes_counted

LONGEST = 200
"""The most characters of a node's code in a note: it may have a value for each row."""


_OUTSIDE_OF_STAGES = {
    "scatter": "the mini-batch was cut into micro-batches",
    "write_back": "what micro-batches have written to an input was written back to it",
    "seeds": "seeds were drawn for the micro-batches",
    "gather": "the outputs of micro-batches were put together",
    "weights": "it was computed by how much the loss of each micro-batch counts, from its rows",
    "loss_weights": "loss_weight was asked by how much the loss of each micro-batch counts",
    "average": "the losses of micro-batches were put together",
    "total": "the losses of replicas were added up",
}
"""What operators of a pipeline graph do for all stages, by their names."""


def where(node: fx.Node, error: BaseException) -> str:
    """The note for an exception that a node of a pipeline graph has raised: the node's stage, its
    micro-batch and what the stage contains, the node within the stage's graph, and its line of the
    model. For a node outside of all stages it says what was done; of one that a pass of the user's
    has added, its code."""
    if STAGE not in node.meta:
        module = getattr(node.target, "__module__", "")
        name = getattr(node.target, "__name__", "") if module == "fxpipe.ops" else ""
        if name in _OUTSIDE_OF_STAGES:
            return f"in fxpipe: while {_OUTSIDE_OF_STAGES[name]} (node {node.name!r})"
        return f"in fxpipe: {shortened(format_node(node), LONGEST)}"
    stage = _stage_module(node)
    contains = "" if stage is None else stage.meta.get(CONTAINS, "")
    said = f" (the stage contains {contains})" * bool(contains)
    text = f"in fxpipe: stage {node.meta[STAGE]}"
    if MICROBATCH in node.meta:
        text += f", micro-batch {node.meta[MICROBATCH]}"
    inner = None if stage is None else _inner_node(stage, error)
    if inner is None:
        return f"{text}, node {node.name!r}{said}"
    text += f", node {inner.name!r}{said}"
    line = _model_line(inner)
    return f"{text}, from\n{line}" if line else text


def _stage_module(node: fx.Node) -> fx.GraphModule | None:
    """The graph of the stage that a node runs; None if it runs none, or one that is compiled."""
    module = node.graph.owning_module
    target = node.target if node.op == "call_module" else None
    if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        target = node.args[0].target if node.args[0].op == "get_attr" else None
    stage = attribute(module, str(target)) if module is not None and target else None
    return stage if isinstance(stage, fx.GraphModule) else None


def _inner_node(stage: fx.GraphModule, error: BaseException) -> fx.Node | None:
    """The node of a stage's graph that was running, found by its line of generated code."""
    for filename, line_number in _frames(error):
        line = linecache.getline(filename, line_number)
        if filename.startswith("<eval_with_key>") and (m := re.match(r"\s*(\w+)\b.*?=", line)):
            for inner in stage.graph.nodes:
                if inner.name == m[1]:
                    return inner  # type: ignore[no-any-return]
    return None


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _model_line(node: fx.Node) -> str | None:
    """The innermost line of the model's source in a node's stack trace; None if there is none."""
    frame = model_frame(node.meta.get("stack_trace"))
    return f"  {frame['text']}" if frame else None


def note_spoilt_backward(error: BaseException, stages: Iterable[fx.GraphModule]) -> None:
    """Add a note to autograd's error of a tensor that it needs, and that has been written to, if
    stages write to parameters or buffers: forwards of other micro-batches come ahead of a backward,
    which none does in a loop over the micro-batches."""
    if not isinstance(error, RuntimeError) or not _is_of_a_write(error):
        return
    writes = (path for s in stages for n in s.graph.nodes for path in n.meta.get(WRITES_STATE, ()))
    if names := list(dict.fromkeys(writes)):
        error.add_note(
            f"the forward writes to {', '.join(names)} in place, in each micro-batch, and a "
            "schedule runs forwards of later micro-batches ahead of a backward that needs what was "
            "there: compute a new tensor in the forward, as scale.clamp(max=5) in place of "
            "scale.clamp_(max=5), or write ahead of the step"
        )


def _is_of_a_write(error: BaseException) -> bool:
    """Whether an error says that a tensor which a backward needs has been written to in place."""
    said = str(error)
    return "modified by an inplace operation" in said or "needed for the backward" in said


@contextmanager
def writes_to_target_noted(target: Any) -> Iterator[None]:
    """Inside the ``with`` block autograd's error of a tensor that it needs, and that has been
    written to, gets a note if the target of a loss has been written to, too.

    The micro-batches' parts of a target are views of it, and autograd counts the writes to all
    views of a tensor together. In a loop over the micro-batches each backward runs ahead of the
    next loss. Parts with counts of their own would hide writes to what the target shares its memory
    with, such as the inputs.
    """
    tensors = tensors_of(target)
    before = [writes_counted(tensor) for tensor in tensors]
    try:
        yield
    except RuntimeError as error:
        if _is_of_a_write(error) and [writes_counted(tensor) for tensor in tensors] != before:
            error.add_note(
                "loss_fn writes to its target in place, and autograd takes that for a write to the "
                "targets of all micro-batches, whose backwards are still to come: compute a new "
                "tensor, as target * 0.5 in place of target.mul_(0.5). The target that was given "
                "to the step has been changed"
            )
        raise
