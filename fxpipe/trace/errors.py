"""Messages for models that cannot be traced: what went wrong, and at which line of the model."""

from __future__ import annotations

import linecache
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.ir.errors import is_itself
from fxpipe.ir.source import is_a_models, is_of_a_model, is_ours
from fxpipe.trace.blame import Blamed

DEPENDS_ON_VALUES = "which way it goes depends on the values of tensors"

NEEDS_VALUES = "this line needs the values of a tensor, which are not known while it is traced"

# What PyTorch says then: as_tensor() was given a proxy of fx, or a kernel a tensor without values.
_SAID_OF_VALUES = "`__cuda_array_interface__` must be a dict", "its data is not allocated yet"

_MAKES_TEXT = "it makes a text of a number that depends on the values of tensors"

# What is said where the number in a tensor is made a number of Python's, or a text.
_SAID_OF_PYTHON = "float() argument must be", "int() argument must be", "unsupported format string"
_SAID_OF_NUMBERS = *_SAID_OF_PYTHON, _MAKES_TEXT

NUMBERS = (
    " A number that is only shown or logged is best returned as a tensor, and made a number or a "
    "text outside of the model."
)

GRADIENTS = "it computes gradients within its forward, which may have to go through several stages"


class Refused(Exception):
    """A front end has failed, or its graph differs from the model; the message says how."""


_OURS = AttributeError, NameError, LookupError, AssertionError


class TextOfValues(GuardOnDataDependentSymNode):
    """A text has been made of a number that is not known while the model is exported."""


def may_be_the_models(error: Exception) -> bool:
    """Whether an exception may be due to the model's code, so that another attempt is worth while.

    It is not where memory has run out, where the model fails by itself, on the inputs as they are,
    nor where the error is a bug in a line of this package.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or is_itself(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not (isinstance(error, _OURS) and frames and is_ours(frames[-1].filename))


@contextmanager
def suppressed() -> Iterator[None]:
    """Inside the ``with`` block, an exception that may be due to the model ends the block without
    an error; any other exception is raised."""
    try:
        yield
    except Exception as error:
        if not may_be_the_models(error):
            raise


def first_line(error: BaseException) -> str:
    """The message of an error in one line, with its type unless it is one of this package's."""
    if isinstance(error, TextOfValues):
        return _MAKES_TEXT
    if isinstance(error, GuardOnDataDependentSymNode):
        return DEPENDS_ON_VALUES
    if isinstance(error, Blamed):
        return str(error)
    if any(said in str(error) for said in _SAID_OF_VALUES):
        return NEEDS_VALUES
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "(no message)"
    if isinstance(error, Refused):  # written here, and may end with a path of any length
        return said
    return f"{type(error).__name__}: {textwrap.shorten(said, 240, placeholder=' ...')}"


def sentence(error: BaseException) -> str:
    """One line: what went wrong, and the last line of the model's code that was running then."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_model_line(f)]
    text = first_line(error)
    return f"{text} (at {at(frames[-1])})" if frames else text


def failure(front_end: str, error: BaseException) -> str:
    """One line: which front end has failed, and :func:`sentence`."""
    return f"{front_end}: {sentence(error)}"


def advice(reasons: list[str]) -> str:
    """What to add to the message of these failures: sentences, or nothing."""
    is_of_numbers = any(said in reason for reason in reasons for said in _SAID_OF_NUMBERS)
    is_of_script = any("is compiled to TorchScript" in reason for reason in reasons)
    return NUMBERS * is_of_numbers + _SCRIPT * is_of_script


_SCRIPT = " In place of what torch.jit.script has made of a module, give the module itself."


def is_model_line(frame: traceback.FrameSummary) -> bool:
    """Whether a frame of a traceback is in the code of a model, and its line is known."""
    return is_of_a_model(frame.filename) and bool(frame.line)


def since(function: Callable[..., Any]) -> list[traceback.FrameSummary]:
    """The frames that run now within the latest call of a function, the outermost first."""
    stack = traceback.extract_stack()
    code = function.__code__
    calls = [
        i for i, f in enumerate(stack) if (f.filename, f.name) == (code.co_filename, code.co_name)
    ]
    return stack[calls[-1] + 1 :] if calls else stack


def at(frame: traceback.FrameSummary) -> str:
    """The file, number and text of a frame's line, for messages."""
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def source_line(filename: str, number: int) -> str:
    """A line of code with its file and number, in the form in which messages show it. Code that is
    typed at a prompt, or run by ``exec``, has no text that is known."""
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {text}" if text else f"{filename}:{number}"


def line_of_the_model(frame: FrameType | None) -> str:
    """The innermost line of a model's code that runs in a frame or leads to it, for messages."""
    while frame is not None and not is_a_models(frame):
        frame = frame.f_back
    if frame is None:
        return "a line that is none of the model's"
    return source_line(frame.f_code.co_filename, frame.f_lineno)
