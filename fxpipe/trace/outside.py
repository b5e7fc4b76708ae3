"""What a forward depends on beside its inputs and its modules, and no graph can have: whether
gradients are recorded, and random number generators of its own.

::

    if torch.is_grad_enabled():        one graph serves calls with gradients, and calls without
    torch.randn(8, generator=self.g)   a graph would use the generator for each micro-batch, in
                                       lanes that run at the same time

To ask is harmless where the answer changes nothing: layers of diffusers ask ahead of a checkpoint.
So a model that asks is run in each of the modes, and is refused where its output differs. It asks
in one of these ways: by a function; by ``is_inference()`` of a value; or by what a hidden value has
only where gradients are recorded, ``hidden.grad_fn`` and ``hidden.is_leaf``. What it asks of
``requires_grad`` is a premise of the graph instead (:mod:`fxpipe.trace.flags`).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.ir.errors import TraceError
from fxpipe.ir.log import warn
from fxpipe.ir.source import is_of_torch, is_ours
from fxpipe.trace import checks
from fxpipe.trace.asker import by_the_model
from fxpipe.trace.errors import at, is_model_line, source_line, suppressed
from fxpipe.trace.example import Example
from fxpipe.trace.patches import patched
from fxpipe.trace.uneven import uneven

_OF_A_TENSOR = "is_inference"
_FUNCTIONS = "is_grad_enabled", "is_inference_mode_enabled", _OF_A_TENSOR
_PROPERTIES = "grad_fn", "is_leaf"


@contextmanager
def modes_asked() -> Iterator[list[str]]:
    """Yields the lines of the model, or of layers of PyTorch's, that ask, within the ``with`` block
    and in this thread, whether gradients are recorded: a list that grows."""
    lines: list[str] = []
    asks = by_the_model(layers=True)

    def note() -> None:
        frame = sys._getframe(2)
        if asks(frame):
            lines.append(source_line(frame.f_code.co_filename, frame.f_lineno))

    def function(original: Callable[..., bool]) -> Callable[..., bool]:
        def asked(*args: Any) -> bool:
            note()
            return original(*args)

        return asked

    def of_tensors(original: Any) -> property:
        def asked(tensor: Tensor) -> Any:
            note()
            return original.__get__(tensor, type(tensor))

        return property(asked, original.__set__)

    with ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(patched(torch, name, function, tells_threads=True))
        stack.enter_context(patched(Tensor, _OF_A_TENSOR, function, tells_threads=True))
        for name in _PROPERTIES:
            stack.enter_context(patched(Tensor, name, of_tensors, tells_threads=True))
        yield lines


def refuse_other_outputs(example: Example, tensors: Sequence[Tensor], lines: list[str]) -> None:
    """Raise TraceError if the model's output on these tensors depends on whether gradients are
    recorded, for which it asks at ``lines``. Warn if only layers of PyTorch's ask: they have a way
    for where none are recorded, which is meant to be faster.

    Of a hidden value they are recorded where parameters ahead of it are trained, which frozen ones
    may be later on. So the model runs with all of its parameters trained, too; and once with inputs
    that have a history. A mode in which the model does not run is left out: the pipeline runs its
    graph there, too, and can differ from no output.

    A model that asks by itself runs on inputs without a pattern as well, as the example may hide a
    difference. For layers of PyTorch's, what they do with the user's own inputs is enough: they may
    differ where all is masked, say, of which no user needs to be warned.
    """
    of_the_model = [line for line in lines if not is_of_torch(line)]
    samples = [tensors, uneven(tensors)] if of_the_model else [tensors] * bool(lines)
    if not any(_differ(example, sample) for sample in samples):
        return
    depends = (
        f"the output of {type(example.model).__name__} depends on whether gradients are recorded"
    )
    if of_the_model:
        raise TraceError(
            f"{depends}, for which it asks (at {of_the_model[0]}), and one graph serves calls with "
            "gradients and calls without: let it ask for self.training instead"
        )
    warn(
        f"{depends}: PyTorch has a fast path for where none are (at {lines[0]}), which "
        "gives zeros at padded positions, say. The pipeline gives what the model gives where they "
        "are, in all calls. torch.backends.mha.set_fastpath_enabled(False) lets the model do so"
    )


def _differ(example: Example, tensors: Sequence[Tensor]) -> bool:
    """Whether the outputs of a model on these tensors differ with the mode that it runs in."""
    outputs = []
    for mode in nullcontext(), torch.inference_mode():
        with suppressed(), mode:
            outputs.append(example.run(tensors).output)
    for trained in nullcontext(), _all_trained(example.model):
        with suppressed(), trained:
            outputs.append(example.run(tensors, recorded=True).output)
    with suppressed():
        outputs.append(example.run(tensors, recorded=True, given=_with_history).output)
    # PyTorch may choose other kernels where it keeps nothing for a backward.
    return any(checks.difference(outputs[0], one, checks.EXPORT_TOLERANCE) for one in outputs[1:])


def _with_history(tensor: Tensor) -> Tensor:
    """A copy of an input that a model ahead of this one could have computed."""
    with torch.inference_mode(False), torch.enable_grad():
        copy = tensor.detach().clone()
        return copy.requires_grad_(copy.is_floating_point()).clone()


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block all parameters of a model require gradients that can."""
    frozen = [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def reasons(example: Example) -> list[str]:
    """A sentence for a random number generator of the model's own, with the first line that draws
    from it. It is made where no front end has given a graph, in one more run of the model."""
    with _noted() as found, suppressed():
        example.run(example.tensors)
    return [_GENERATOR.format(line) for line in found[:1]]


_GENERATOR = (
    "It draws random numbers from a generator of its own (at {}), whose state no graph keeps: "
    "leave out generator=, so that torch.manual_seed() says what is drawn, or give the numbers as "
    "an input"
)


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Yields the lines of the model that draw from a generator of its own: a list that grows."""
    found: list[str] = []

    class Generators(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if isinstance((kwargs or {}).get("generator"), torch.Generator):
                frames = [f for f in traceback.extract_stack() if not is_ours(f.filename)]
                if is_model_line(frames[-1]):
                    found.append(at(frames[-1]))
            return function(*args, **(kwargs or {}))

    with Generators():
        yield found
