"""The layout of tensors and their history in memory, where a forward asks for these.

::

    if x.is_contiguous():              a trace answers for a fresh, contiguous tensor; a micro-batch
        return self.a(x)               may be a part of a larger one, in any order
    x.as_strided(size, x.stride())     strides are constants of an exported graph

To ask is harmless where the answer changes nothing: most models make a tensor contiguous that is
not, or hand strides on. So a model that asks is run a few times more, and refused where its output
differs: on inputs with the same values in other layouts; and once for each line that asks, with
another answer there, which hidden values may have as well. It is so on the inputs of the call, and
on others without a pattern, as a mask of ones hides what is masked. The graph has to give the same
on inputs in other layouts. PyTorch's own code asks to choose among kernels that compute the same:
it does not count.

The address of a tensor, ``data_ptr()``, is watched nowhere: an export fails on it, and a symbolic
trace leaves it to the run, so that no graph has one as a constant.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import BASE, IS_VIEW, IS_ZERO, TYPED_STORAGE, VERSION
from fxpipe.ir.errors import Unsupported
from fxpipe.trace import checks
from fxpipe.trace.asker import by_the_model
from fxpipe.trace.errors import Refused, first_line, may_be_the_models, source_line, suppressed
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.patches import patched
from fxpipe.trace.uneven import uneven

TOLERANCE = 1e-4  # relative: PyTorch chooses other kernels for other layouts

Layout = Callable[[Tensor], Tensor]

Otherwise = Callable[[Tensor, Any], Any] | None
"""Another answer than the one to a question about a tensor; None if there is none that could be."""


def _opposite(tensor: Tensor, answer: bool) -> bool:
    return not answer


def _one_more(tensor: Tensor, answer: int) -> int:
    return answer + 1


_FUNCTIONS: dict[str, Otherwise] = dict.fromkeys(("is_conj", "is_neg"), _opposite)
_METHODS: dict[str, Otherwise] = {
    **_FUNCTIONS,
    **dict.fromkeys(("is_contiguous", IS_VIEW, "is_shared", "is_pinned"), _opposite),
    **dict.fromkeys(("is_set_to", IS_ZERO), _opposite),
    **dict.fromkeys(("stride", "storage_offset")),  # other numbers would be none of any tensor
    **dict.fromkeys(("untyped_storage", "storage", TYPED_STORAGE)),
    "dim_order": lambda tensor, answer: answer[::-1],
}
_PROPERTIES: dict[str, Otherwise] = {
    **dict.fromkeys((VERSION, "output_nr"), _one_more),
    BASE: lambda tensor, answer: tensor if answer is None else None,
    "retains_grad": _opposite,
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
    two = tensors if example.batch is None else example.resized(2)  # a row alone has any stride
    for sample in tensors, uneven(two):
        fresh = _output(example, sample)
        for line, count in Counter(lines).items():
            with _other_answers(line, count):
                otherwise = _output(example, sample)
            if _differ(fresh, otherwise):
                _refuse(example, line)
        for values, layout in _in_other_layouts(sample):
            contiguous = fresh if values is sample else _output(example, values)
            if _differ(contiguous, _output(example, values, layout)):
                _refuse(example, lines[0])


def compare(example: Example, tensors: Sequence[Tensor], traced: Traced, lines: list[str]) -> None:
    """Raise ``Refused`` unless the graph of a model that asks at ``lines`` gives what the model
    gives on inputs in other layouts."""
    samples = (tensors, uneven(tensors)) if lines else ()
    for values, layout in (each for sample in samples for each in _in_other_layouts(sample)):
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
    """Values, and functions that give them in another layout. Where one layout needs values that
    are repeated, they are repeated from several places: those from one may be without effect."""
    for layout in _offset, _spaced, _reversed, _swapped, _channels_last:
        yield tensors, layout
    along = [
        partial(_repeated, dim=dim) for dim in range(max((t.ndim for t in tensors), default=0))
    ]
    for layout in (*along, *(partial(_everywhere, place=place) for place in (0.0, 0.5, 1.0))):
        yield [layout(tensor).contiguous() for tensor in tensors], layout


def _offset(tensor: Tensor) -> Tensor:
    """A part of a larger tensor, which does not begin where that does."""
    flat = tensor.flatten()
    return torch.cat((flat[:1], flat))[-flat.numel() :].view(tensor.shape)


def _spaced(tensor: Tensor) -> Tensor:
    """Every other element of a larger tensor."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def _repeated(tensor: Tensor, dim: int) -> Tensor:
    """What is first along a dimension, everywhere along it: its stride is 0."""
    if tensor.ndim <= dim or not tensor.numel():
        return tensor.clone()
    return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)


def _everywhere(tensor: Tensor, place: float) -> Tensor:
    """One element, everywhere: all strides are 0.

    Args:
        place: where the element is, from 0 for the first to 1 for the last.
    """
    if not tensor.numel():
        return tensor.clone()
    chosen = round(place * (tensor.numel() - 1))
    return tensor.flatten()[chosen].clone().expand(tensor.shape)


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
        for name in _FUNCTIONS:
            stack.enter_context(patched(torch, name, method(name), tells_threads=True))
        for name in _METHODS:
            stack.enter_context(patched(Tensor, name, method(name), tells_threads=True))
        for name in _PROPERTIES:
            stack.enter_context(patched(Tensor, name, of_tensors(name), tells_threads=True))
        yield
