"""The layout of tensors and their history in memory, where a forward asks for these.

::

    if x.is_contiguous():              a trace answers for a fresh, contiguous tensor; a micro-batch
        return self.a(x)               may be a part of a larger one, in any order
    x.as_strided(size, x.stride())     strides are constants of an exported graph

To ask is harmless where the answer changes nothing: most models make a tensor contiguous that is
not, or hand strides on. So a model that asks is run a few times more, and refused where its output
differs: on inputs with the same values in other layouts; and once for each line that asks, with
another answer there, which hidden values may have as well. The graph has to give the same on inputs
in other layouts. PyTorch's own code asks to choose among kernels that compute the same: it does not
count.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import BASE, IS_VIEW, VERSION
from fxpipe.ir.errors import Unsupported
from fxpipe.trace import checks
from fxpipe.trace.asker import by_the_model
from fxpipe.trace.errors import Refused, first_line, may_be_the_models, source_line, suppressed
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.patches import patched

TOLERANCE = 1e-4  # relative: PyTorch chooses other kernels for other layouts

Layout = Callable[[Tensor], Tensor]


def _opposite(tensor: Tensor, answer: bool) -> bool:
    return not answer


_METHODS: dict[str, Callable[[Tensor, Any], Any] | None] = {
    **dict.fromkeys(("is_contiguous", IS_VIEW, "is_shared", "is_neg", "is_conj"), _opposite),
    **dict.fromkeys(("stride", "storage_offset")),  # other numbers would be none of any tensor
}
_PROPERTIES: dict[str, Callable[[Tensor, Any], Any] | None] = {
    VERSION: lambda tensor, answer: answer + 1,
    BASE: lambda tensor, answer: tensor if answer is None else None,
}
_OTHERWISE = {**_METHODS, **_PROPERTIES}


@contextmanager
def layouts_asked() -> Iterator[list[str]]:
    """Yields the lines of the model that ask, within the ``with`` block and in this thread, for the
    layout of a tensor or its history in memory: a list that grows."""
    lines: list[str] = []

    def note(line: str, tensor: Tensor, name: str, answer: Any) -> Any:
        lines.append(line)
        return answer

    with _answered(note):
        yield lines


def refuse_other_outputs(example: Example, tensors: Sequence[Tensor], lines: list[str]) -> None:
    """Raise Unsupported if the model's output on these tensors depends on their layout, or on an
    answer at one of ``lines``. A run that fails tells nothing: the model does not go on then."""
    if not lines:
        return
    fresh = _output(example, tensors)
    for line, count in Counter(lines).items():
        with _other_answers(line, count):
            otherwise = _output(example, tensors)
        if _differ(fresh, otherwise):
            _refuse(example, line)
    for values, layout in _in_other_layouts(tensors):
        if _differ(_output(example, values), _output(example, values, layout)):
            _refuse(example, lines[0])


def compare(example: Example, tensors: Sequence[Tensor], traced: Traced, lines: list[str]) -> None:
    """Raise ``Refused`` unless the graph of a model that asks at ``lines`` gives what the model
    gives on inputs in other layouts."""
    for values, layout in _in_other_layouts(tensors) if lines else ():
        expected = _output(example, values, layout)
        if expected is None:
            continue
        try:
            actual = example.run(values, traced, given=layout).output
        except Exception as error:
            if not may_be_the_models(error):
                raise
            actual = first_line(error)
        if checks.difference(expected[0], actual, TOLERANCE):
            raise Refused(f"it has the layout of its inputs as a constant (at {lines[0]})")


def _refuse(example: Example, line: str) -> None:
    raise Unsupported(
        f"the output of {type(example.model).__name__} depends on the layout or the history of a "
        f"tensor, for which it asks (at {line}): a micro-batch may have another than the batch; "
        "let the forward compute the same in each case, or give what decides as an argument"
    )


# ------------------------------------------------------------------------------- runs to compare


def _differ(one: tuple[Any] | None, other: tuple[Any] | None) -> bool:
    """Whether two outputs differ, where there are both."""
    if one is None or other is None:
        return False
    return checks.difference(one[0], other[0], TOLERANCE) is not None


def _output(
    example: Example, tensors: Sequence[Tensor], layout: Layout = torch.clone
) -> tuple[Any] | None:
    """What the model gives, in a tuple; None if it fails. It may need gradients to run."""
    for recorded in False, True:
        with suppressed():
            return (example.run(tensors, recorded=recorded, given=layout).output,)
    return None


def _in_other_layouts(tensors: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], Layout]]:
    """Values, and functions that give them in another layout."""
    for layout in _offset, _spaced, _reversed, _swapped, _channels_last:
        yield tensors, layout
    yield [_repeated(tensor).contiguous() for tensor in tensors], _repeated


def _offset(tensor: Tensor) -> Tensor:
    """A part of a larger tensor, which does not begin where that does."""
    flat = tensor.flatten()
    return torch.cat((flat[:1], flat))[-flat.numel() :].view(tensor.shape)


def _spaced(tensor: Tensor) -> Tensor:
    """Every other element of a larger tensor."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def _repeated(tensor: Tensor) -> Tensor:
    """The first element, everywhere: all strides are 0."""
    return tensor.flatten()[:1].clone().expand(tensor.shape) if tensor.numel() else tensor


def _reversed(tensor: Tensor) -> Tensor:
    return _in_order(tensor, [*range(tensor.ndim)][::-1])


def _swapped(tensor: Tensor) -> Tensor:
    """With the last two dimensions in the other order in memory."""
    *first, last = range(tensor.ndim) if tensor.ndim else (0,)
    return _in_order(tensor, [*first[:-1], last, *first[-1:]])


def _channels_last(tensor: Tensor) -> Tensor:
    dims = [*range(tensor.ndim)]
    return _in_order(tensor, [*dims[:1], *dims[2:], *dims[1:2]])


def _in_order(tensor: Tensor, dims: list[int]) -> Tensor:
    """The tensor with its dimensions in this order in memory."""
    if tensor.ndim < 2:
        return tensor.clone()
    back = [dims.index(dim) for dim in range(tensor.ndim)]
    return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(back)


# --------------------------------------------------------------------------------- other answers


@contextmanager
def _other_answers(line: str, count: int) -> Iterator[None]:
    """Inside the ``with`` block the first ``count`` questions at a line are answered otherwise; a
    loop that ends by the answer would not end if all were."""
    left = [None] * count

    def other(at: str, tensor: Tensor, name: str, answer: Any) -> Any:
        otherwise = _OTHERWISE[name]
        if at != line or otherwise is None or not left:
            return answer
        left.pop()
        return otherwise(tensor, answer)

    with _answered(other):
        yield


@contextmanager
def _answered(answered: Callable[[str, Tensor, str, Any], Any]) -> Iterator[None]:
    """Inside the ``with`` block ``answered(line, tensor, name, answer)`` gives what a question of
    the model's in this thread is answered, where PyTorch would give ``answer``."""
    asks = by_the_model()

    def given(tensor: Tensor, name: str, answer: Any) -> Any:
        frame = sys._getframe(2)
        if not asks(frame):
            return answer
        line = source_line(frame.f_code.co_filename, frame.f_lineno)
        return answered(line, tensor, name, answer)

    def method(name: str) -> Callable[[Any], Any]:
        def replace(original: Any) -> Any:
            def asked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                return given(tensor, name, original(tensor, *args, **kwargs))

            return asked

        return replace

    def of_tensors(name: str) -> Callable[[Any], Any]:
        def replace(original: Any) -> Any:
            def asked(tensor: Tensor) -> Any:
                get = original.__get__
                return given(tensor, name, get(tensor, type(tensor)))

            return property(asked)

        return replace

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(patched(Tensor, name, method(name), tells_threads=True))
        for name in _PROPERTIES:
            stack.enter_context(patched(Tensor, name, of_tensors(name), tells_threads=True))
        yield
