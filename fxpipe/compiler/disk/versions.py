"""Where code comes from, and in which version."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch

import passes
from fxpipe.compiler.disk.errors import NotKept
from fxpipe.ir.source import is_ours


class Origin(Enum):
    """Where code comes from, which decides how its version is known."""

    VERSIONED = "Python, PyTorch or fxpipe: known by a version, or by a digest of all files"
    INSTALLED = "a package that has been installed: known by a version, or by all of its files"
    USERS = "the user: known by the code itself"


_VERSIONED = {"torch", "fxpipe", "passes", *sys.stdlib_module_names} - {"__main__"}
_PYTHON = tuple(f"{Path(sysconfig.get_paths()[k])}/" for k in ("stdlib", "platstdlib"))
_TORCH = f"{Path(torch.__file__).parent}/"
_SITE = "site-packages", "dist-packages"


def package_of(module: str) -> str:
    """The name of the top-level package that a module of this name belongs to."""
    return module.partition(".")[0]


@cache
def origin_of_file(filename: str) -> Origin:
    """Where the code in a file comes from. Code that is in no file is the user's."""
    if filename.startswith(_TORCH) or is_ours(filename) or filename.startswith("<frozen "):
        return Origin.VERSIONED
    if any(part in _SITE for part in Path(filename).parts):
        return Origin.INSTALLED
    return Origin.VERSIONED if filename.startswith(_PYTHON) else Origin.USERS


@cache
def origin_of_module(name: str) -> Origin:
    """Where the module of this name comes from, by its name or by its file."""
    if package_of(name) in _VERSIONED:
        return Origin.VERSIONED
    module = sys.modules.get(name)
    filename = getattr(module, "__file__", None)
    if module is None or filename is None:
        is_builtin = name in sys.builtin_module_names
        return Origin.VERSIONED if is_builtin else Origin.USERS
    return origin_of_file(filename)


def origin_of_class(kind: type) -> Origin:
    """Where a class comes from. One that its module does not have under its name has been made
    while the process ran, and counts as the user's."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    is_named = found is kind or kind.__module__ == "builtins"
    return origin_of_module(kind.__module__) if is_named else Origin.USERS


def version_of_package(name: str) -> str:
    """The version of an installed package as it says itself."""
    return str(getattr(sys.modules.get(name), "__version__", "without a version"))


@cache
def source_of_package(name: str) -> str:
    """A digest of all Python files of an installed package."""
    module = sys.modules.get(name)
    filename = getattr(module, "__file__", None)
    files = [file for folder in getattr(module, "__path__", ()) for file in _files_in(folder)]
    if not files and filename is not None:
        files = [filename]
    if not files:
        raise NotKept(f"the package {name} has no files that could be read")
    return _digest_of(files)


@cache
def versions() -> tuple[str, ...]:
    """The versions of Python, PyTorch and fxpipe."""
    own = [os.path.dirname(package.__file__ or "") for package in (sys.modules["fxpipe"], passes)]
    return (
        sys.version,
        platform.machine(),
        torch.__version__,
        str(torch.version.git_version),
        torch.backends.cpu.get_cpu_capability(),
        _digest_of(file for folder in own for file in _files_in(folder)),
    )


def _files_in(folder: str) -> Iterator[str]:
    """The Python files in a folder. Some packages have thousands, for which ``Path`` takes longer
    than it takes to read them."""
    for place, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each != "__pycache__"]
        yield from (os.path.join(place, name) for name in names if name.endswith(".py"))


def _digest_of(files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb", buffering=0) as opened:
            content = opened.readall()
        digest.update(f"{os.path.basename(file)} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
