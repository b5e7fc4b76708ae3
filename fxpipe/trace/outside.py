"""What a forward depends on beside its inputs and its modules, and no graph can have: whether
gradients are recorded, and random number generators of its own.

::

    if torch.is_grad_enabled():        one graph serves calls with gradients, and calls without
    torch.randn(8, generator=self.g)   a graph would use the generator for each micro-batch, in
                                       lanes that run at the same time

Such a model is refused since its graph differs from it. The difference does not tell why; these
sentences do. They are made where no front end has given a graph, in one more run of the model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpipe.ir.source import is_ours
from fxpipe.trace.errors import at, is_model_line, suppressed
from fxpipe.trace.example import Example
from fxpipe.trace.patches import patched


def reasons(example: Example) -> list[str]:
    """A sentence for each kind of thing that the model asks for, with the first line that does."""
    with _noted() as found, suppressed():
        example.run(example.tensors)
    return [sentence.format(line) for sentence, line in found.items()]


_GRADIENTS = (
    "It asks whether gradients are recorded (at {}), and one graph serves calls with gradients "
    "and calls without: ask for self.training instead"
)
_GENERATOR = (
    "It draws random numbers from a generator of its own (at {}), whose state no graph keeps: "
    "leave out generator=, so that torch.manual_seed() says what is drawn, or give the numbers as "
    "an input"
)


@contextmanager
def _noted() -> Iterator[dict[str, str]]:
    """Yields, for each sentence, the first line of the model to which it applies: a dictionary that
    grows."""
    found: dict[str, str] = {}

    def note(sentence: str) -> None:
        frames = [f for f in traceback.extract_stack() if not is_ours(f.filename)]
        # PyTorch asks for gradients, too, in its own functions and layers.
        if sentence not in found and is_model_line(frames[-1]):
            found[sentence] = at(frames[-1])

    def replace(original: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            note(_GRADIENTS)
            return original()

        return asked

    class Generators(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if isinstance((kwargs or {}).get("generator"), torch.Generator):
                note(_GENERATOR)
            return function(*args, **(kwargs or {}))

    with patched(torch, "is_grad_enabled", replace), Generators():
        yield found
