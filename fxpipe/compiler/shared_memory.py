"""The refusal of a call whose inputs share memory, where the model writes to one of them in place.

::

    y = x[:, :3]
    pipe(x, y)         the model runs x.add_(1), and then reads y

The model sees in ``y`` what it has written to ``x``. Stages write to copies of inputs, so that they
can be run again, and these share no memory with ``y``. So it is with a target that shares memory
with an input: the loss would be computed with its values as they were ahead of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from fxpipe.compiler.compiled import Mode
from fxpipe.ir.tensors import overlap, tensors_of
from fxpipe.runtime.apart import Apart


def refuse_shared_memory(
    mode: Mode, model: nn.Module, values: Sequence[Any], targets: Sequence[Any] = ()
) -> None:
    """Raise ValueError if the model writes to an input that shares memory with another input, with
    a target, or with a parameter or a buffer of the model. One tensor that is given for several
    arguments is one within the model, too.

    Args:
        values: those of the placeholders.
        targets: the tensors in the target of a step.
    """
    if not mode.written_inputs:
        return  # of most models, ahead of each call
    # Behind those of the inputs there may be one for the seed.
    placeholders = mode.stage_graph.graph.find_nodes(op="placeholder")[: len(values)]
    names = [node.name for node in placeholders]
    for place in mode.written_inputs:
        own, said = values[place], names[place]
        others = zip(names, values, strict=True)
        of_inputs = ((other, f"the input {other!r}", v) for other, v in others if v is not own)
        of_targets = (("target", "the target", value) for value in targets)
        tensors = chain(model.named_parameters(), model.named_buffers())
        of_model = ((said, f"the model's {name!r}", tensor) for name, tensor in tensors)
        for other, what, value in chain(of_inputs, of_targets, of_model):
            if any(overlap(a, b) for a in _whole(own) for b in _whole(value)):
                raise ValueError(
                    f"{type(model).__name__} writes to its input {said!r} in place, and {what} has "
                    f"the same memory: it would change with {said!r} in the model, and does not in "
                    f"a pipeline, which writes to copies. Give {other}.clone(), which keeps the "
                    f"values of before, or write to a clone of {said!r} in the model"
                )


def _whole(value: Any) -> list[Tensor]:
    """The tensors in a value, but for those of which the stages have the parts: nobody else has
    their memory."""
    return [t for t in tensors_of(value) if not (isinstance(t, Apart) and t.is_in_parts)]
