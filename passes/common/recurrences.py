"""Recurrences: a recurrent layer that PyTorch runs step by step is not run over all of its steps on
fake tensors.

::

    gru, 160 steps     ─▶   gru, 2 steps      each further step runs as many operators, moves as
                            gru, 3 steps      many bytes and keeps as much as the third one
                            stand-in, 160 steps

On the CPU a GRU, an RNN, and an LSTM for which oneDNN has no kernel are a dozen operators for each
step, forward and backward. To run them on fake tensors takes longer than to compute with them, and
says nothing that a few steps do not say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.ir._torch import FakeTensor, disable_current_modes
from fxpipe.ir.autograd import leaf_of, reached
from fxpipe.ir.load import AMOUNTS, Counting, Load
from fxpipe.ir.stand_in import Output, StandIn
from fxpipe.ir.tensors import memory_bytes, memory_of, tensor_bytes

_ATEN = torch.ops.aten
_OF_STATE = {torch.gru, torch.rnn_tanh, torch.rnn_relu}
_OF_STATE |= {_ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input}
_OF_STATES = {torch.lstm, _ATEN.lstm.input}  # of the state and of the cell
FEW = 2
"""The work of so many steps, and of one more, says what each further one does."""
LATE = 6
"""With fewer steps than these the most memory is there at another moment than with many."""
RUN = 2 * FEW + 1 + 3 * LATE  # steps that run in place of all


class Recurrences(TorchFunctionMode):
    """A mode in which a recurrent layer that PyTorch takes apart into its steps is one stand-in for
    all of them, if its tensors are fakes. ``counts``: whether its work is counted; if not, there is
    none, and less has to run to know the outputs."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        layer = _Recurrence.of(func, args) if not kwargs else None
        found = None if layer is None else layer.stood_for(self.counts)
        return func(*args, **kwargs) if found is None else found


@dataclass(frozen=True)
class _Steps:
    """What so many steps do, forward and backward.

    Attributes:
        results: what they give.
        forward, rest, backward: their work; ``rest`` is that of the forward without products.
        kept: the bytes that they save for the backward, beside inputs, weights and results.
        saved_sources, saved_results: the places of the inputs and weights, and of the results, that
            they save.
        edges: how many edges of the autograd graph lead to each input and weight.
    """

    results: tuple[Tensor, ...]
    forward: Load
    rest: Load
    backward: Load
    kept: int
    saved_sources: tuple[int, ...]
    saved_results: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class _Recurrence:
    """A call of a recurrent layer on fake tensors.

    Attributes:
        func: the function that is called.
        x: its input, whose steps are along the dimension ``along``.
        states, weights: the first states, and the weights.
        rest: its further arguments.
    """

    func: Any
    x: Tensor
    along: int
    states: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    rest: tuple[Any, ...]

    @staticmethod
    def of(func: Any, args: Sequence[Any]) -> _Recurrence | None:
        """The layer that is called; None if none is, as with a packed sequence, or one that has few
        steps."""
        if (func not in _OF_STATE and func not in _OF_STATES) or len(args) != 9:
            return None
        x, states, weights, *rest = args
        states = (states,) if isinstance(states, Tensor) else tuple(states)
        if len(states) != 1 + (func in _OF_STATES) or isinstance(weights, Tensor):
            return None  # a packed sequence, which has other arguments in their places
        *_, batch_first = rest
        along = 1 if batch_first else 0
        tensors = (x, *states, *weights)
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            return None
        if x.dim() != 3 or x.shape[along] <= RUN:
            return None
        return _Recurrence(func, x, along, states, tuple(weights), tuple(rest))

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """All tensors that the layer is given."""
        return self.x, *self.states, *self.weights

    def stood_for(self, counts: bool) -> tuple[Tensor, ...] | None:
        """What a stand-in for the layer gives, with its work if this ``counts``; None if PyTorch
        does not take the layer apart, so that it has as many operators for any number of steps."""
        few, more = (self._run(steps, backward=counts) for steps in (FEW, FEW + 1))
        if few.forward.operators == more.forward.operators:
            return None
        further = int(self.x.shape[self.along]) - FEW

        def grown(one: int, other: int) -> int:
            return one + (other - one) * further

        def of_all(name: str) -> Load:
            one, other = getattr(few, name), getattr(more, name)
            amounts: Any = {
                each: grown(getattr(one, each), getattr(other, each)) for each in AMOUNTS
            }
            return Load(is_half=one.is_half, is_full=one.is_full, **amounts)

        forward, rest, backward = of_all("forward"), of_all("rest"), of_all("backward")
        if counts:
            forward.memory, backward.memory = self._peaks()
        products = Load(
            forward.flops - rest.flops,
            forward.bytes - rest.bytes,
            forward.operators - rest.operators,
        )
        *_, dropout, train, _, _ = self.rest
        if dropout and train:  # a number, for who looks whether any is drawn
            forward = _less(forward, [torch.rand(())], 1)
        own = self.x, *self.states
        again = [
            source for source, count in zip(own, few.edges, strict=False) for _ in range(count - 1)
        ]
        # Those of weights are added to each other at once, and hold no memory.
        counts_of_weights = few.edges[len(own) :]
        used_again = [
            w for w, count in zip(self.weights, counts_of_weights, strict=True) if count > 1
        ]
        stand_in = StandIn(
            [
                self._output(one, other)
                for one, other in zip(few.results, more.results, strict=True)
            ],
            forward,
            _less(backward, again, 3),  # gradients of one source are added to each other
            products,
            grown(few.kept, more.kept),
            few.saved_sources,
            few.saved_results,
            uncounted=len(used_again),
        )
        return tuple(stand_in.call([*self.sources, *again, *used_again]))

    def _output(self, few: Tensor, more: Tensor) -> Output:
        shape = list(few.shape)
        if few.shape != more.shape:
            shape[self.along] = int(self.x.shape[self.along])
        return Output(tuple(shape), few.dtype, few.requires_grad)

    def _peaks(self) -> tuple[int, int]:
        """The memory that all steps need while they run, forward and backward.

        It is the most that is there at one time: something of the weights, of each row, and of each
        row and step. When that is depends on all three, so what two numbers of steps need does not
        say it. It is what as many rows and steps need in few steps of many rows, without the
        further rows.
        """
        rows, steps = self.x.shape[1 - self.along], self.x.shape[self.along]
        fewer = math.ceil(rows * steps / (2 * LATE))  # rows of the run that has more steps
        few, more = self._run(LATE, 2 * fewer), self._run(2 * LATE, fewer)

        def peak(few: int, more: int) -> int:
            return more - (few - more) * (fewer - rows) // fewer

        return (
            peak(few.forward.memory, more.forward.memory),
            peak(few.backward.memory, more.backward.memory),
        )

    def _run(self, steps: int, rows: int | None = None, backward: bool = True) -> _Steps:
        """Run so many steps forward and ``backward``, unseen by those who watch what operators do.
        ``rows``: of so many rows; None: of as many as there are."""
        fake: Any = self.x
        rows = self.x.shape[1 - self.along] if rows is None else rows
        with disable_current_modes(), fake.fake_mode:
            shape = [steps, rows] if self.along == 0 else [rows, steps]
            tensors = (
                self.x.new_empty([*shape, self.x.shape[2]]),
                *(state.new_empty([state.shape[0], rows, state.shape[2]]) for state in self.states),
                *(weight.detach() for weight in self.weights),
            )
            sources = [
                tensor.requires_grad_(source.requires_grad)
                for tensor, source in zip(tensors, self.sources, strict=True)
            ]
            _, *others = sources
            states, weights = others[: len(self.states)], others[len(self.states) :]
            own = states[0] if self.func in _OF_STATE else states
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                kept[memory_of(tensor)] = memory_bytes(tensor)
                return tensor

            forward, rest, behind = Load(), Load(), Load()
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, Counting(forward, rest):
                results = self.func(sources[0], own, weights, *self.rest)
            edges = _edges(results)
            wanted = [source for source in sources if id(source) in edges]
            if wanted and backward:
                given = [result for result in results if result.requires_grad]
                gradients = [torch.empty_like(result) for result in given]
                with Counting(behind):
                    torch.autograd.grad(given, wanted, gradients)
        known = [memory_of(tensor) for tensor in (*sources, *results)]
        return _Steps(
            results,
            forward,
            rest,
            behind,
            sum(size for memory, size in kept.items() if memory not in known),
            _places(kept, sources),
            _places(kept, results),
            tuple(edges.get(id(source), 0) for source in sources),
        )


def _less(load: Load, tensors: Sequence[Tensor], times: int) -> Load:
    """A load without operators that are counted beside it: one for each of these tensors, which
    moves so many times its bytes."""
    size = times * tensor_bytes(tensors)
    return replace(load, bytes=load.bytes - size, operators=load.operators - len(tensors))


def _places(kept: dict[int, int], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(i for i, tensor in enumerate(tensors) if memory_of(tensor) in kept)


def _edges(results: Sequence[Tensor]) -> Counter[int]:
    """How many edges of the autograd graph lead to each leaf, by its id."""
    starts = [result.grad_fn for result in results if result.grad_fn is not None]
    found = Counter[int]()
    for node in reached(starts):
        for function, _ in node.next_functions:
            if function is not None and (leaf := leaf_of(function)) is not None:
                found[id(leaf)] += 1
    return found
