"""A call of a model, as guards look at it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.structure import Structure, is_opened, leaves
from fxpipe.ir.tensors import attributes_of, class_of
from fxpipe.runtime.microbatch import InDim
from fxpipe.trace import bound_arguments


class GuardedCall:
    """A call of a model, as the guards look at it. Its parts are computed when a guard asks.

    Args:
        dims: the batch dimension of each tensor of the call, None for one that is shared. If
            ``dims`` itself is None, guards do not compare batch dimensions.
        records_gradients: whether the call records gradients; by default whether this thread does.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Sequence[InDim] | None = None,
        records_gradients: bool | None = None,
    ) -> None:
        self.model, self.args, self.kwargs, self.dims = model, args, kwargs, dims
        self.records_gradients = (
            torch.is_grad_enabled() if records_gradients is None else records_gradients
        )

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises TypeError for those that the model does not take."""
        return dict(bound_arguments(self.model, self.args, self.kwargs).arguments)

    @cached_property
    def _taken_apart(self) -> tuple[list[Any], Structure]:
        return Structure.of(self.arguments)

    @property
    def tensors(self) -> list[Any]:
        """The tensors among the arguments, in order."""
        return self._taken_apart[0]

    @property
    def paths(self) -> list[str]:
        """The path of each tensor, such as ``past.layers[0].keys``."""
        return [path.removeprefix(".") for path in self._taken_apart[1].paths()]

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten(self.arguments)

    @cached_property
    def _leaves(self) -> list[list[tuple[str, Any]]]:
        """The leaves of each part of the arguments: a part is an object that pytree does not know,
        or a leaf itself."""
        return [list(leaves(part)) for part in self._flat[0]]

    @cached_property
    def constants(self) -> list[Any]:
        """The arguments, and parts of arguments, that are no tensors."""
        return [
            value for part in self._leaves for _, value in part if not isinstance(value, Tensor)
        ]

    @property
    def paths_of_constants(self) -> list[str]:
        """The path of each constant, such as ``batch.names[1]``."""
        return [
            path.removeprefix(".")
            for path, value in leaves(self.arguments)
            if not isinstance(value, Tensor)
        ]

    @cached_property
    def built(self) -> tuple[Hashable, ...]:
        """How the arguments are nested, where tensors are among them, and which are one object."""
        parts, spec = self._flat
        kinds = tuple(type(part) if is_opened(part) else None for part in parts)
        places = tuple(
            (path, isinstance(value, Tensor)) for part in self._leaves for path, value in part
        )
        return spec, kinds, places, self._taken_apart[1].same

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class of each tensor, and the attributes that are set on it: a forward may ask for
        both."""
        return tuple((class_of(tensor), *attributes_of(tensor)) for tensor in self.tensors)

    @property
    def require_gradients(self) -> tuple[bool, ...]:
        """Whether each tensor requires a gradient."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    @property
    def autocast(self) -> tuple[torch.dtype | None, ...]:
        """The autocast dtype, or None, of each kind of device that tensors are on."""
        return autocast_of(self.tensors)


def autocast_of(tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, ...]:
    """The autocast dtype, or None, of each kind of device that the tensors are on."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in sorted({tensor.device.type for tensor in tensors} - {"meta"})
    )
