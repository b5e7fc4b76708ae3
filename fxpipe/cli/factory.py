"""The argument ``MODULE:FACTORY``, which names a function that makes the model and example inputs
of a command."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from fxpipe.cli.errors import UserError
from fxpipe.ir.options import meant

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Given:
    """A model, and the arguments of one mini-batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape and dtype of an input, as given on the command line: ``8,3,32,32`` for floats, or
    ``8,128:int64``."""

    sizes: tuple[int, ...]
    dtype: str

    def tensor(self) -> Any:
        """A tensor of this shape: normal random numbers for a floating dtype, else zeros."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"no dtype {self.dtype!r} is known: give such as float32 or int64")
        if dtype.is_floating_point:
            return torch.randn(self.sizes).to(dtype)
        return torch.zeros(self.sizes, dtype=dtype)


def shape(value: str) -> Shape:
    """Parse a shape such as ``8,3,32,32`` or ``8,128:int64``."""
    sizes, _, dtype = value.partition(":")
    try:
        found = tuple(map(int, sizes.split(",")))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise click.BadParameter(f"{value!r}: give sizes, such as 8,3,32,32, or 8,128:int64")
    return Shape(found, dtype or "float32")


def factory_name(value: str) -> str:
    """Check that a value has the form ``MODULE:FACTORY``, and is not the path of a file."""
    module, _, name = value.partition(":")
    if not module or not name:
        raise click.BadParameter(f"{value!r}: give MODULE:FACTORY, such as models:build")
    if module.endswith(".py") or os.sep in module:
        words = module.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise click.BadParameter(f"{module!r} is a file: give its module, {words}:{name}")
    return value


def chain_named(value: str) -> Any:
    """The chain of passes that a user has named as ``MODULE:CHAIN``: a chain, or a function without
    arguments that gives one."""
    from passes import Chain

    module, _, path = factory_name(value).partition(":")
    made = _attribute(_module(module), module, path)
    if callable(made) and not isinstance(made, Chain):
        made = _called(made, value)
    if not isinstance(made, Chain):
        raise UserError(
            f"{value} gives a {type(made).__name__}: it has to give a chain, such as "
            'fxpipe.default_chain().before("split", YourPass())'
        )
    return made


def _called(factory: Callable[[], Any], name: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise UserError(f"{name} failed: {_where(error)}") from error


def factory_argument(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument FACTORY to a command, and the option ``--input``, whose inputs replace those
    that the factory makes."""
    command = click.option(
        "--input",
        "shapes",
        type=shape,
        multiple=True,
        metavar="SIZES[:DTYPE]",
        help="Sizes and dtype of an input of the model, such as 8,3,32,32 or 8,128:int64; repeat "
        "the option for further inputs. Default: the inputs that FACTORY returns.",
    )(command)
    return click.argument("factory", type=factory_name, metavar="MODULE:FACTORY")(command)


def load(factory: str, shapes: Sequence[Shape]) -> Given:
    """Load a model and its inputs from a factory.

    A factory is a function (or class) without arguments, or a model itself. PyTorch's seed is set
    before the factory runs, so that the weights are the same every time.

    Args:
        factory: ``MODULE:FACTORY``.
        shapes: the inputs that the user asks for. If there are none, the factory gives them.

    Raises:
        UserError: if the factory does not exist, fails, or returns anything but a model or a tuple
            of a model and its inputs; or if neither ``shapes`` nor the factory gives inputs.
    """
    import torch

    module, _, path = factory.partition(":")
    torch.manual_seed(0)  # the import may make the model
    made = _attribute(_module(module), module, path)
    if callable(made) and not isinstance(made, torch.nn.Module):
        torch.manual_seed(0)  # the import may have drawn random numbers
        made = _called(made, factory)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{factory} gives a {type(made).__name__}: it has to give an nn.Module, or a tuple "
            "of one and its example inputs"
        )
    if shapes:
        return Given(model, tuple(shape.tensor() for shape in shapes), {})
    if inputs is None:
        raise UserError(
            f"{factory} gives a model and no inputs: let it return (model, example_inputs), or "
            "give their sizes, such as --input 8,3,32,32"
        )
    if isinstance(inputs, Mapping):
        return Given(model, (), dict(inputs))
    return Given(model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


@contextmanager
def called_with(given: Given) -> Iterator[None]:
    """Explain an error inside the ``with`` block if the model itself fails on these inputs.

    Raises:
        UserError: if the model fails on the inputs; the message names them. Other errors pass.
    """
    from fxpipe.ir.errors import is_itself  # here, so that --help need not wait
    from fxpipe.trace.errors import sentence

    try:
        yield
    except Exception as error:
        is_clicks = isinstance(error, click.ClickException | click.exceptions.Exit | click.Abort)
        failure = error if is_itself(error) else None if is_clicks else _failure(given)
        if failure is None:
            raise
        raise UserError(
            f"{type(given.model).__name__} cannot be called with {_said(given)}: "
            f"{sentence(failure)}\n"
            "Give other inputs with --input SIZES[:DTYPE], such as 8,3,32,32 or 8,128:int64, one "
            "for each argument; for inputs that are no tensors (a dict, say) let FACTORY be a "
            "function that returns (model, (inputs,))"
        ) from error


def _failure(given: Given) -> Exception | None:
    """The error that the model itself raises when it is called with the inputs; None if it runs."""
    import torch

    from fxpipe.trace import untouched

    try:
        with torch.no_grad(), untouched(given.model):
            given.model(*given.args, **given.kwargs)
    except Exception as error:
        return error
    return None


def _said(given: Given) -> str:
    """The inputs in words, such as ``float32 [8, 9], scale=int``."""
    from fxpipe.inspect.draw.picture import type_text

    def text(value: Any) -> str:
        return type_text(value) or type(value).__name__

    found = [text(value) for value in given.args]
    found += [f"{name}={text(value)}" for name, value in given.kwargs.items()]
    return ", ".join(found) or "no inputs"


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:  # modules in the current folder are found, as by `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"there is no module {name!r}: it is looked for in {os.getcwd()} and where "
                "Python looks for modules (PYTHONPATH)"
            ) from error
        raise UserError(f"{name} cannot be imported: {_where(error)}") from error


def _attribute(found: Any, module: str, path: str) -> Any:
    for name in path.split("."):
        if not hasattr(found, name):
            near = meant(name, dir(found))
            advice = f": did you mean {near!r}?" if near else ""
            raise UserError(f"the module {module!r} has no {path!r}{advice}")
        found = getattr(found, name)
    return found


def _where(error: Exception) -> str:
    """An error of the user's code in words, with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
