"""What a model keeps from one call to the next: buffers and parameters that its forward writes to,
and attributes of its modules that its forward changes.

::

    all rows at once     state ── 5 rows ── state after them
    in micro-batches     state ── 3 rows ── state ── 2 rows ── state after them       alike?

A micro-batch finds what the micro-batch before it has left. So a moving average takes several steps
for one mini-batch, a counter counts micro-batches, and a queue of keys from earlier rows has those
of the same mini-batch in it. Accumulating gradients over micro-batches by hand does the same, so
that a warning says it. A running maximum, on the other hand, is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxpipe.ir.structure import leaves
from fxpipe.meaning.compare import Difference, difference
from fxpipe.meaning.sample import part
from fxpipe.meaning.trial import Trial

Calls = Callable[[Sequence[list[Tensor]]], tuple[list[Any], dict[str, Tensor]]]
"""Calls a model on several lists of tensors, one after the other, and gives its outputs and, by
name, what its buffers and parameters hold after the last call."""


def lasting_problem(
    calls: Calls, trial: Trial, dims: Sequence[int | None], changed: Sequence[str]
) -> str:
    """What differs if the parts of a sample find the state that the parts before them have left;
    an empty string if nothing does.

    Args:
        calls: calls the model.
        trial: the sample.
        dims: the batch dimensions of the inputs.
        changed: the names of what the forward changes: buffers, parameters and attributes.
    """
    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    _, expected = calls([whole])
    outputs, found = calls(trial.each(dims))
    rows, sizes = sum(trial.sizes), " and then ".join(map(str, trial.sizes))
    for output, alone in zip(outputs, trial.parts, strict=True):
        for path, value in leaves(output, "output"):
            apart = _apart(alone.get(path), value)
            if apart:
                return (
                    f"{path} depends on the state that an earlier call leaves in "
                    f"{_listed(changed)}, and each micro-batch is a call: after {sizes} rows it "
                    f"differs by {apart} from what it is for these rows alone"
                )
    for name in changed:
        if name in expected and (apart := _apart(expected[name], found.get(name))):
            return (
                f"the forward changes {_listed(changed)}, which each micro-batch does by itself: "
                f"after {sizes} rows {name} differs by {apart} from what it is after {rows} rows "
                "at once"
            )
    return ""


def _apart(one: Any, other: Any) -> Difference | None:
    is_known = isinstance(one, Tensor) and isinstance(other, Tensor) and not one.is_meta
    return difference(one, other) if is_known else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
