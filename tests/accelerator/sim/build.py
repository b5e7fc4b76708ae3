"""Builds the library of the device "sim", once for all processes that need it."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_HERE = Path(__file__).parent
_LIBRARIES = ("c10", "torch_cpu", "torch")


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def built() -> Path:
    """The library, in a folder that is named after what it is made from.

    Raises RuntimeError with what the compiler says.
    """
    files = sorted(_HERE.glob("*.h")) + sorted(_HERE.glob("*.cpp"))
    made_from = [torch.__version__, sys.prefix, *(file.read_text() for file in files)]
    key = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fxpipe-sim-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _build([f for f in files if f.suffix == ".cpp"], Path(scratch)).rename(library)
    return library


def _build(sources: list[Path], folder: Path) -> Path:
    includes = [part for path in include_paths() for part in ("-isystem", path)]
    flags = ["-std=c++20", "-O1", "-fPIC"]

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        _run(*flags, *includes, "-c", str(source), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor() as threads:
        objects = list(threads.map(compiled, sources))
    library = folder / "sim.so"
    search = [f"-L{path}" for path in library_paths()]
    _run("-shared", *objects, *search, *(f"-l{name}" for name in _LIBRARIES), "-o", str(library))
    return library


def _run(*arguments: str) -> None:
    done = subprocess.run([compiler() or "g++", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated device could not be built:\n{done.stderr}")
