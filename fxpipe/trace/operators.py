"""The operators that layers run, noted in a run of a model on fake tensors.

Where a model has no values, its graph cannot be compared with it by what both compute. But a layer
that runs the same operators as another one, in the same order, on tensors that come from the same
places, computes the same function of its inputs and its parameters. This takes one run of the
model, which computes nothing.

::

    h + relu(linear(h))        addmm(bias, input 0, t(weight)), relu(made 1), add(input 0, made 2)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode, pytree
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.somewhere import Somewhere
from fxpipe.ir.structure import Structure
from fxpipe.ir.tensors import memory_of
from fxpipe.trace.example import Example
from fxpipe.trace.gradients import has_gradient, history_of, without_saved_tensors
from fxpipe.trace.isolation import parameters_put_back, untouched
from fxpipe.trace.patches import quiet
from fxpipe.trace.whole import standing_in


def operators_of(example: Example, layers: Mapping[nn.Module, str]) -> dict[str, Hashable]:
    """For each call of a layer what it runs: calls with equal values are alike. The keys are those
    of :func:`fxpipe.trace.whole.standing_in`.

    The dictionary is empty if the model does not run on fake tensors.
    """
    if not layers:
        return {}
    model, noted = example.model, _Noted(layers)

    def run() -> Any:
        noted.calls.clear()
        with Somewhere(allow_non_fake_inputs=True) as fakes, noted:
            tensors = [fakes.from_tensor(tensor) for tensor in example.tensors]
            with standing_in(layers, noted.call):
                return example.call(tensors)

    with (
        untouched(model),
        parameters_put_back(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        quiet(),
    ):
        try:
            results, _ = Structure.of(without_saved_tensors(run))
        except Exception as error:
            if not is_the_models(error):
                raise
            return {}
    noted.use(results)
    return noted.calls


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of each call of a layer."""

    def __init__(self, layers: Mapping[nn.Module, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = layers
        self.calls: dict[str, Hashable] = {}
        self._kept: list[Tensor] = []  # so that no memory gets the number of an earlier one
        self._inside: dict[int, str] = {}  # memory that a call has made and does not return
        self._key = ""  # of the call that runs
        self._names: dict[int, Hashable] = {}  # of its tensors, by their memory
        self._operators: list[Hashable] = []

    def call(
        self, module: nn.Module, forward: Callable[..., Any], key: str, args: Any, kwargs: Any
    ) -> Any:
        tensors, structure = Structure.of((args, kwargs))
        if self._key or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return forward(*args, **kwargs)
        # Leaves of their own end the autograd graph of this layer; they may not be written to.
        ends = [t.detach().requires_grad_(has_gradient(t)) for t in tensors]
        given = [end.clone() for end in ends]
        own = [*module.parameters(), *module.buffers()]
        self._key, self._operators = key, []
        self._names = {memory_of(tensor): ("own", i) for i, tensor in enumerate(own)}
        self._names |= {memory_of(tensor): ("input", i) for i, tensor in enumerate(given)}
        try:
            some, named = structure.fill(given)
            output = forward(*some, **named)
        finally:
            self._key = ""
        results, _ = Structure.of(output)
        found = [each for each in results if isinstance(each, Tensor)]
        names = tuple(map(self._name, found))
        history = history_of(list(found), inputs=[*ends, *own])
        for tensor in found:
            self._inside.pop(memory_of(tensor), None)
        self.calls[key] = tuple(self._operators), names, history
        return output

    def use(self, value: Any) -> None:
        """Note that tensors are used: a call whose tensors are used elsewhere, other than by what
        it returns, is like no other."""
        for tensor in _tensors(value):
            key = self._inside.get(memory_of(tensor), self._key)
            if key != self._key:
                self.calls[key] = object()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.use((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if self._key and func is not torch.ops.prim.device.default:  # which computes nothing
            given = self._described((args, kwargs))
            for tensor in _tensors(result):
                self._kept.append(tensor)
                memory = memory_of(tensor)
                if memory not in self._names:
                    self._names[memory] = "made", len(self._names)
                    self._inside[memory] = self._key
            self._operators.append((str(func), given, self._described(result)))
        return result

    def _described(self, value: Any) -> Hashable:
        """A value with names in place of tensors, and with the types of its constants: True is no
        1."""
        parts, spec = pytree.tree_flatten(value)
        return spec, tuple(
            self._name(part) if isinstance(part, Tensor) else (type(part).__name__, repr(part))
            for part in parts
        )

    def _name(self, tensor: Tensor) -> Hashable:
        """What tells tensors of a layer apart: their memory, and which part of it they are. A
        tensor from outside of the layer has a name that no other call has."""
        name = self._names.get(memory_of(tensor), (self._key, id(tensor)))
        place = (tensor.stride(), tensor.storage_offset()) if _is_dense(tensor) else ()
        return name, tuple(tensor.shape), place, tensor.dtype, tensor.device


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
