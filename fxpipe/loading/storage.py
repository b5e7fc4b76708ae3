"""Memory for the tensors of a model that are on "meta".

::

    layer.weight     Parameter, meta                      an optimizer, a tie or a hook holds it
          │ exchange(): new memory, same object
    layer.weight     the same Parameter, on "cuda:1"      the optimizer, tie or hook holds it still

Tensors stay the same objects. So an optimizer that was made before, modules that share a parameter,
and attributes that are one tensor under two names keep working.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import exchange, memory_number, version_of


def without_values(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that are on "meta", by name: parameters, buffers, and tensors that are
    plain attributes of modules. A tensor that has several names is listed under the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        for name, tensor in tensors_of(module):
            if tensor.is_meta:
                found.setdefault(id(tensor), (f"{path}.{name}".removeprefix("."), tensor))
    return dict(found.values())


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are attributes of a module, not of its children, with their names."""
    for own in (module._parameters, module._buffers, vars(module)):
        yield from ((name, value) for name, value in own.items() if isinstance(value, Tensor))


@dataclass
class Storage:
    """Gives memory to tensors on "meta", and puts tensors on "meta" again to which nothing has been
    written.

    Args:
        homes: the devices of the tensors, by name; a tensor that has none is put on the CPU.
    """

    homes: Mapping[str, torch.device]
    _versions: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def give(
        self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """Give tensors memory on their devices. The memory is not initialised.

        Args:
            tensors: the tensors, by name.
            dtypes: by name, the dtypes of tensors that get another dtype than they have on "meta".
        """
        storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        uses = Counter(memory_number(tensor) for tensor in tensors.values())
        for name, tensor in tensors.items():
            home = self.homes.get(name, torch.device("cpu"))
            dtype = (dtypes or {}).get(name, tensor.dtype)
            number = memory_number(tensor)
            new = torch.empty_like(tensor, dtype=dtype, device=home, requires_grad=False)
            if uses[number] > 1 and dtype == tensor.dtype:  # views of one memory share it again
                if (number, home) not in storages:
                    size = tensor.untyped_storage().nbytes()
                    memory = torch.empty(size, dtype=torch.uint8, device=home)
                    storages[number, home] = memory.untyped_storage()
                place = tensor.storage_offset(), tensor.size(), tensor.stride()
                new = torch.empty(0, dtype=dtype, device=home).set_(storages[number, home], *place)
            exchange(tensor, new)
            self._versions[id(tensor)] = tensor, version_of(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a tensor has been written to since :meth:`give` gave it memory."""
        given, version = self._versions[id(tensor)]
        return version_of(given) != version

    def take_back(self, is_wanted: Callable[[Tensor], bool] | None = None) -> None:
        """Put tensors on "meta" again: those for which ``is_wanted`` is true; by default, those to
        which nothing has been written."""
        for tensor, _ in list(self._versions.values()):
            if not self.is_written(tensor) if is_wanted is None else is_wanted(tensor):
                exchange(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))
                del self._versions[id(tensor)]
