"""Rows that are mixed by way of a buffer: the forward writes to it what it computes of all rows,
and then computes with it.

::

    self.mean.lerp_(h.mean(0), 0.1)        of all rows
    return self.b(h - self.mean)           for each row

The values of these writes are noted while the model runs on all rows of a sample, and are written
again in the runs on its parts, in place of their own. If the parts give what the whole gives then,
these writes are what mixes rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import memory_of
from fxpipe.meaning.check import differs
from fxpipe.meaning.runs import ModelRuns
from fxpipe.meaning.trial import Trial, taken
from fxpipe.runtime.writes import written_by
from fxpipe.trace import called
from fxpipe.trace.errors import at, is_model_line, since


@dataclass
class _WritesToBuffer:
    """What a forward has written to a buffer.

    Attributes:
        where: the line of the first write; "" if it is in a module of PyTorch.
        values: those after each write.
    """

    where: str
    values: list[Tensor] = field(default_factory=list)


def mixed_in_buffers(
    runs: ModelRuns, trial: Trial, dims: Sequence[int | None], path: str
) -> dict[str, str]:
    """The buffers by way of which rows are mixed in an output, if that is why it differs between
    the whole of a sample and its parts: by their names, the lines that write to them."""
    buffers = dict(runs.model.named_buffers())
    names = [name for name in runs.changed or () if name in buffers]
    noted: dict[str, _WritesToBuffer] = {}

    def mix(some: Sequence[str]) -> bool:
        names_of = {memory_of(buffers[name]): name for name in some}
        noted.clear()

        def run(tensors: list[Tensor]) -> Any:
            again = _WritesRepeated(names_of, noted) if noted else _WritesNoted(names_of, noted)
            return runs.within(again).output_of(tensors)

        return any(not differs(each, path) for each in taken(run, trial, dims))

    if not names or not differs(trial, path) or not mix(names):
        return {}
    where = {name: written.where for name, written in noted.items()}
    needed = [name for name in names if name in where]
    for name in list(needed):  # without one on which nothing depends, the others still mix rows
        fewer = [other for other in needed if other != name]
        if fewer and mix(fewer):
            needed = fewer
    return {name: where[name] for name in needed}


class _WritesNoted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators write to buffers, whose names it gets by their memory."""

    supports_higher_order_operators = True

    def __init__(self, names: dict[int, str], noted: dict[str, _WritesToBuffer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.noted = names, noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in written_by(func, args, kwargs or {}):
            if (name := self.names.get(memory_of(tensor))) is not None:
                self.on_write(name, tensor)
        return result

    def on_write(self, name: str, tensor: Tensor) -> None:
        """Called after each write to a buffer, with what has been written to: it, or a view."""
        if name not in self.noted:
            lines = [frame for frame in since(called) if is_model_line(frame)]
            self.noted[name] = _WritesToBuffer(at(lines[-1]) if lines else "")
        self.noted[name].values.append(tensor.clone())


class _WritesRepeated(_WritesNoted):  # type: ignore[no-untyped-call]
    """Writes the noted values to the buffers, after each write to them."""

    def __init__(self, names: dict[int, str], noted: dict[str, _WritesToBuffer]) -> None:
        super().__init__(names, noted)
        self.next = {name: iter(written.values) for name, written in noted.items()}

    def on_write(self, name: str, tensor: Tensor) -> None:
        """Write the values that the same write has had for all rows."""
        value = next(self.next.get(name, iter(())), None)
        if value is not None and value.shape == tensor.shape:
            tensor.copy_(value)
