"""Checkpoints on disk, as tensors whose values are read when they are used.

::

    model.safetensors.index.json    {"weight_map": {"a.weight": "model-00001-of-2.safetensors"}}
    model-00001-of-2.safetensors    a.weight: bfloat16 [4096, 4096], 32 MiB further on
    stored_tensors(folder)          {"a.weight": Stored, bfloat16 [4096, 4096]}: nothing is read
    parameter.copy_(stored)         reads this one tensor, copies it, and lets it go

A state dict that is made of such tensors can be given to ``load_state_dict``, to its hooks, or to
code that renames its keys: at no time is more than one tensor of the checkpoint in memory. Files of
safetensors hold no code, and files of ``torch.save`` are read with ``weights_only=True``.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import no_torch_function, pytree, wrapper_tensor
from fxpipe.ir.text import kind

_INDEX = ".index.json"
_KINDS = (
    (f"*.safetensors{_INDEX}", "*.safetensors"),
    (f"*.bin{_INDEX}", "*.bin", "*.pt", "*.pth", "*.ckpt"),
)
"""The patterns of checkpoints in a folder, in the order in which they are looked for: safetensors
before other files, and the index of a sharded checkpoint before its shards."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's dtypes for the most frequent dtypes of safetensors. A tensor of any other dtype is read
to learn its PyTorch dtype."""


class Stored(Tensor):
    """A tensor in a file. Its shape and dtype are known; its values are read from the file by every
    operator that uses it, and are not kept."""

    __torch_function__ = no_torch_function
    read: Callable[[], Tensor]

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Stored:
        """A tensor on the CPU, of this shape and dtype, whose values ``read`` returns."""
        made: Stored = wrapper_tensor(Stored, tuple(shape), dtype)
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.read(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({self.dtype}, {list(self.shape)})"


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name. Each is read from the file when an operator uses it,
    and is not kept.

    To load a checkpoint into a model whose names have another prefix, rename its keys::

        stored = fxpipe.loading.stored_tensors("gpt2/model.safetensors")
        pipe.load({f"transformer.{name}": tensor for name, tensor in stored.items()})

    Args:
        path: a file of safetensors; a file of ``torch.save``; the index of a sharded checkpoint of
            either kind, as Hugging Face writes it; or a folder with one of these.

    Raises:
        FileNotFoundError: if there is no such file, or a shard is missing.
        ValueError: if a folder holds no checkpoint, or several; if a file holds no state dict, or
            is no file of its kind.
        TypeError: for what is no path.
        ImportError: for files of safetensors, if the library ``safetensors`` is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the checkpoint is {kind(path)}: give the path of a file or of a folder, or a dict "
            "from names to tensors"
        )
    path = Path(path)
    if path.is_dir():
        path = _checkpoint_in(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.name.endswith(".json"):
        return _sharded(path)
    return _of_one_file(path)


def _checkpoint_in(folder: Path) -> Path:
    """The file of the checkpoint in a folder. If there are several, it is the one whose name begins
    with ``model.`` or ``pytorch_model.``, as Hugging Face names checkpoints."""
    for kinds in _KINDS:
        for pattern in kinds:
            found = sorted(folder.glob(pattern))
            named = [each for each in found if each.name.startswith(("model.", "pytorch_model."))]
            if len(found) > 1 and len(named) != 1:
                names = ", ".join(each.name for each in found)
                raise ValueError(f"{folder} holds several checkpoints ({names}): give one of them")
            if found:
                return (named or found)[0]
    raise ValueError(
        f"{folder} holds no checkpoint: give a folder or a file of safetensors, or of torch.save"
    )


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        is_one = all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_one = False
    if not is_one:
        raise ValueError(
            f"{index} is no index of a sharded checkpoint, which has a weight_map from the names "
            "of tensors to files: give the index, a folder or a file of safetensors or torch.save"
        )
    shards: dict[str, dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, file in weight_map.items():
        if file not in shards:
            if not (index.parent / file).exists():
                raise FileNotFoundError(f"{index} names the file {file}, which is not beside it")
            shards[file] = _of_one_file(index.parent / file)
        if name not in shards[file]:
            raise ValueError(f"{index} says that {name} is in {file}, which does not hold it")
        found[name] = shards[file][name]
    return found


def _of_one_file(path: Path) -> dict[str, Tensor]:
    return _in_safetensors(path) if path.suffix == ".safetensors" else _in_torch(path)


# ---------------------------------------------------------------------------- files of safetensors


def _in_safetensors(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    library = _safetensors()
    try:
        opened = library.safe_open(path, framework="pt")
    except library.SafetensorError as error:
        raise ValueError(
            f"{path} is no file of safetensors, as its name says ({error}): give one that has been "
            "written in full"
        ) from error
    with opened as file:
        for name in file.keys():  # noqa: SIM118, as it is no dict
            part = file.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype()) or file.get_tensor(name).dtype
            found[name] = Stored.of(part.get_shape(), dtype, partial(_from_safetensors, path, name))
    return found


def _from_safetensors(path: Path, name: str) -> Tensor:
    # The file is opened anew for each tensor, so that its memory mapping ends with the tensor.
    with _safetensors().safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "files of safetensors are read by the library of that name: pip install safetensors"
        ) from error
    return safetensors


# ----------------------------------------------------------------------------- files of torch.save


def _in_torch(path: Path) -> dict[str, Tensor]:
    return {
        name: Stored.of(tensor.shape, tensor.dtype, partial(_from_torch, path, name))
        for name, tensor in _opened(path).items()
    }


def _first_sentence(error: Exception) -> str:
    """What PyTorch could not read, without its advice to trust the file."""
    found = re.search(r"Unsupported \w+: \w+ \S+", str(error))
    return f"It has: {found[0]}" if found else f"PyTorch says: {str(error).splitlines()[0]}"


def _from_torch(path: Path, name: str) -> Tensor:
    return _opened(path)[name]


def _opened(path: Path) -> Mapping[str, Tensor]:
    """The state dict of a file, mapped into memory. Nobody keeps it, since a mapped file takes
    address space, and to map it again takes milliseconds only."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no checkpoint, or one in the format of PyTorch before version 1.6: load "
            f"that one by pipe.load(torch.load({str(path)!r}, weights_only=True))"
        )
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint. A file is not trusted: it may hold tensors, "
            "numbers, text and containers of these only, as torch.save(model.state_dict(), path) "
            f"writes them, and not objects such as a whole model. {_first_sentence(error)}"
        ) from error
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(held).__name__}, not a state dict")
    others = [name for name, value in held.items() if not isinstance(value, Tensor)]
    if others:
        within = [name for name in others if isinstance(held[name], Mapping)]
        which = within[0] if within else "..."
        raise ValueError(
            f"{path} holds more than the tensors of a model ({others[0]!r} is a "
            f"{type(held[others[0]]).__name__}): give its state dict, "
            f"pipe.load(torch.load({str(path)!r}, mmap=True)[{which!r}])"
        )
    return held
