"""Which files hold the code of a user's model: messages and reports point to lines of these."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_HERE = Path(__file__).parents[1]  # the folder fxpipe
# With the separator at the end: torchvision's folder begins as torch's does.
_OURS = (f"{_HERE}{os.sep}", f"{_HERE.parent / 'passes'}{os.sep}")
# PyTorch is found, and not imported, which takes a second: the command's help needs none of it.
_FOUND = find_spec("torch")
_TORCH = _FOUND.submodule_search_locations if _FOUND is not None else None
_TORCHS = tuple(f"{folder}{os.sep}" for folder in _TORCH or ())
_OTHERS = (*_TORCHS, *_OURS)
_LAYERS = tuple(os.path.join(folder, "nn", "") for folder in _TORCH or ())
_DEMO = str(_HERE / "demo.py")
_PYTHONS = f"{Path(os.__file__).parent}{os.sep}"
_PACKAGES = ("fxpipe", "passes", "torch")
_GENERATED = ("<eval_with_key>", "<frozen ")  # by fx for a graph, and with Python's own modules


@cache
def is_ours(filename: str) -> bool:
    """Whether a file is one of fxpipe's own, the demonstration's model left aside."""
    return filename != _DEMO and filename.startswith(_OURS)


@cache
def is_of_a_model(filename: str) -> bool:
    """Whether the code of a file may be a model's: not PyTorch's, nor ours, nor Python's own, nor
    generated for a graph.

    All else may be: what is typed at a prompt (its file is "<stdin>"), is in a cell of a notebook,
    or is run by ``exec`` ("<string>") is in no file that there is.
    """
    others = *_OTHERS, *_GENERATED
    return filename == _DEMO or not (filename.startswith(others) or is_pythons(filename))


@cache
def is_of_torch(filename: str) -> bool:
    """Whether a file of code is one of PyTorch's own, by the folder that it is in."""
    return filename.startswith(_TORCHS)


@cache
def is_of_a_layer(filename: str) -> bool:
    """Whether a file is of a layer of PyTorch's, and not of what calls layers."""
    return filename.startswith(_LAYERS) and not filename.endswith(f"{os.sep}module.py")


@cache
def is_a_users(filename: str, module: str) -> bool:
    """Whether code of a file and a module may have been written by a user, or for one. The module
    tells of code that PyTorch or fxpipe has made by ``exec``, whose file does not."""
    is_a_packages = module.split(".")[0] in _PACKAGES and filename != _DEMO
    return is_of_a_model(filename) and not is_a_packages


@cache
def is_installed(filename: str) -> bool:
    """Whether a file is of a package that has been installed, other than in place."""
    return any(
        f"{os.sep}{folder}{os.sep}" in filename for folder in ("site-packages", "dist-packages")
    )


def is_users_type(kind: type) -> bool:
    """Whether a class is written in a module of a user, or of one who writes models."""
    module = sys.modules.get(kind.__module__)
    file = str(getattr(module, "__file__", None) or "")
    return kind.__module__ != "builtins" and is_a_users(file, kind.__module__)


def is_a_models(frame: FrameType) -> bool:
    """Whether a frame runs code that may be a model's."""
    return is_a_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


@cache
def is_pythons(filename: str) -> bool:
    """Whether a file is of Python's own library."""
    return filename.startswith(_PYTHONS) and "site-packages" not in filename


_FRAME = re.compile(r' *(?P<text>File "(?P<file>.*?)", line (?P<number>\d+).*\n *(?P<code>.*))')


def model_frame(trace: str | None) -> re.Match[str] | None:
    """The innermost frame of a stack trace that is of a model; None if none is.

    ``torch.fx`` keeps the stack at which a node was recorded as text only, so that a regular
    expression has to take it apart. Its groups: "text", as Python prints the frame, without the
    indentation; "file", "number" and "code", the line of code.
    """
    frames = [f for f in _FRAME.finditer(trace or "") if is_of_a_model(f["file"])]
    return frames[-1] if frames else None
