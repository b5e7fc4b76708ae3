"""The arguments of a call, kept so that the call can be made again.

A checkpointed function runs a second time in the backward, and needs its arguments for that. They
are saved as autograd saves any tensor. So they are freed when autograd frees the graph, a write to
them is noticed, and an outer checkpoint, which packs what is saved within it, does not keep them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import DisableTorchFunction, pytree
from fxpipe.ir.tensors import is_shape
from fxpipe.runtime.random import GeneratorState

_here = threading.local()  # .saving: whether this thread is saving arguments just now


def are_being_saved() -> bool:
    """Whether the tensors that autograd saves just now in this thread are a call's arguments."""
    return getattr(_here, "saving", False)


class _Save(torch.autograd.Function):
    """An autograd node that computes nothing, and only saves the tensors that it is given.

    Since autograd saves them, hooks on saved tensors around the checkpoint pack them (so that an
    outer checkpoint does not keep them), and autograd raises an error if one is written to before
    it is needed again.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("no loss depends on the output of this node")


class _Inner(torch.autograd.Function):
    """Gives a tensor without history one autograd node, so that it is no leaf.

    An argument that was no leaf in the first run has to be none in the second: autograd refuses
    writes to leaves that require gradients.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: tuple[Tensor]) -> Tensor:
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class KeptInputs:
    """The arguments of one call, kept until the call is made again.

    Args:
        inputs: the arguments, in any structure that pytree knows.
        preserve_rng_state: whether generators among them are kept with their present state.
    """

    def __init__(self, inputs: Any, preserve_rng_state: bool) -> None:
        leaves, self.spec = pytree.tree_flatten(inputs, is_leaf=is_shape)
        self.where = [i for i, leaf in enumerate(leaves) if _can_be_saved(leaf)]
        self.tensors = [leaves[i] for i in self.where]
        self.leaves = [self._kept(leaf, preserve_rng_state) for leaf in leaves]
        self.kinds = [(t.requires_grad, t.is_leaf, dict(t.__dict__)) for t in self.tensors]

    @staticmethod
    def _kept(leaf: Any, preserve_rng_state: bool) -> Any:
        if _can_be_saved(leaf):
            return None
        if preserve_rng_state and isinstance(leaf, torch.Generator):
            return GeneratorState(leaf)
        return leaf

    def save(self) -> None:
        """Hand the tensors over to autograd, which keeps them until they are asked for."""
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        _here.saving = True
        try:
            # The result is kept, since in PyTorch 2.11 its grad_fn does not keep the tensors alive.
            self.saved = _Save.apply(anchor, *self.tensors)  # type: ignore[no-untyped-call]
        finally:
            _here.saving = False
        self.tensors = []

    def again(self) -> Any:
        """The arguments of the first call, without the autograd history that they had."""
        leaves = [
            leaf.again() if isinstance(leaf, GeneratorState) else leaf for leaf in self.leaves
        ]
        saved: tuple[Tensor, ...] = self.saved.grad_fn.saved_tensors
        for i, tensor, kind in zip(self.where, saved, self.kinds, strict=True):
            leaves[i] = _cut_off(tensor, *kind)
        return pytree.tree_unflatten(leaves, self.spec)


def _can_be_saved(leaf: Any) -> bool:
    """Whether an argument is a tensor that autograd saves.

    Autograd refuses inference tensors; these are kept as any other object is, by a reference.
    """
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _cut_off(
    tensor: Tensor, requires_grad: bool, is_leaf: bool, attributes: dict[str, Any]
) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):  # it is a leaf, so it has no history to cut off
        return tensor
    with DisableTorchFunction(), torch.enable_grad():
        twin = without_history(tensor, attributes)
        if not requires_grad:
            return twin
        if is_leaf:
            return twin.requires_grad_()
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        return _Inner.apply(anchor, (twin,))  # type: ignore[no-untyped-call,no-any-return]


def without_history(tensor: Tensor, attributes: dict[str, Any]) -> Tensor:
    """An alias of the tensor without autograd history, of the tensor's class and with these Python
    attributes."""
    with DisableTorchFunction():
        twin = tensor.detach()
        kind = type(tensor)
        if type(twin) is not kind and kind is not torch.nn.Parameter:
            twin = twin.as_subclass(kind)
        for name, value in attributes.items():
            twin.__dict__.setdefault(name, value)
        return twin
