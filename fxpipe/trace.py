"""Front ends: from any model, called on example inputs, to the model graph.

Two are tried in turn, and neither is believed. ``torch.fx``'s symbolic tracing comes first: it
keeps the model's own modules and leaves every size symbolic. ``torch.export`` takes what it cannot.
Each graph is then run beside the model, at the example's batch size and at others, since
micro-batches are smaller; one that disagrees is thrown away. Tracing leaves the model, its buffers
and the random number generators as they were.

All graphs are called alike: with a value for each tensor among the inputs, in the order in which
pytree flattens ``(args, kwargs)``. All other inputs (None, flags, sizes...) are part of the trace.
"""

from __future__ import annotations

import inspect
import io
import linecache
import logging
import operator
import random
import re
import sys
import textwrap
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy

# The pytree that torch.export and Hugging Face register their types with.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe import skip, whole
from fxpipe.runtime.ambient import Ambient
from fxpipe.structure import Structure, is_opened, leaves

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
BatchDims = Sequence[int | None]
CustomTracer = Callable[[nn.Module, Args, Kwargs], fx.GraphModule]

EXPORT_TOLERANCE = 1e-5  # relative: export decomposes some modules into other kernels
GRADIENT_TOLERANCE = 1e-3  # of the largest: the small ones may be mere rounding errors


class TraceError(RuntimeError):
    """No front end can turn the model into a graph; the message says why, for each of them."""


class _Refused(Exception):
    """A front end's graph is not the model; the message says how it differs."""


@dataclass
class Traced:
    """A model graph, and how to call it as the model is called."""

    graph_module: fx.GraphModule
    front_end: str  # "symbolic", "export" or "custom"
    bind: Callable[[Args, Kwargs], list[Any]]
    """The model's ``(args, kwargs)`` as placeholder values, in order."""
    rebuild: Callable[[Any], Any]
    """The graph's output as the model's own structure."""
    largest_batch: int = sys.maxsize
    """Beyond it the model takes another branch, which the graph has not."""
    warning: str = ""
    """What to say besides if the graph turns out not to be the model."""


def canonical(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The same call, with each argument where the signature of ``model.forward`` puts it.

    Raises TypeError, as the model would, for arguments that the model does not take.
    """
    bound = bound_arguments(model, args, kwargs)
    return bound.args, bound.kwargs


def autocast_of(tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, ...]:
    """The autocast dtype, or None, of each kind of device that the tensors are on."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in sorted({tensor.device.type for tensor in tensors} - {"meta"})
    )


def input_key(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    batch_dims: BatchDims | None = None,
    shapes: bool = True,
) -> Hashable:
    """What a trace is specialised on: two calls with equal keys may share one.

    That is the structure of the inputs, the values of those that are not tensors, every module, its
    training flag and whether it has hooks, and the autocast state. ``torch.export`` also fixes
    dtypes and all sizes but the batch's; ``shapes=False`` leaves them out, which is right for a
    "symbolic" trace.
    """
    inputs = canonical(model, args, kwargs)
    parts, spec = pytree.tree_flatten(inputs)
    tensors, _ = Structure.of(inputs)
    constants = tuple(
        (path, type(part), _constant_key(leaf)) for part in parts for path, leaf in leaves(part)
    )
    modules = tuple((id(m), m.training, has_hooks(m)) for m in model.modules())
    key = (spec, constants, modules, autocast_of(tensors))
    if not shapes:
        return key
    dims = _infer_batch_dims(tensors) if batch_dims is None else batch_dims
    return (*key, tuple(_shape_key(t, dim) for t, dim in zip(tensors, dims, strict=True)))


def trace(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs | None = None,
    *,
    tracer: str | CustomTracer = "auto",
    batch_dims: BatchDims | None = None,
    check: bool = True,
) -> Traced:
    """The model graph of ``model`` as called with ``args`` and ``kwargs``.

    Args:
        tracer: "auto" (symbolic, then export), "symbolic", "export", or a function
            ``(model, args, kwargs) -> fx.GraphModule`` with a placeholder for each input tensor.
        batch_dims: for each input tensor, in order, its batch dimension or None; by default the
            first, of every tensor whose first dimension has the size most of them have.
        check: whether to run the model and its graph and compare. On "meta" there is nothing to
            compare.

    Raises:
        TraceError: if no front end gives a graph that computes what the model computes.
        ValueError: for a tracer or ``batch_dims`` that is none.

    What the model itself raises on these inputs is passed on as it is.
    """
    with _ONE_AT_A_TIME:
        return _trace(model, args, kwargs or {}, tracer, batch_dims, check)


# fx takes over nn.Module while it traces, and what a trace does to the model is put back after it.
_ONE_AT_A_TIME = threading.RLock()


def _trace(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    tracer: str | CustomTracer,
    batch_dims: BatchDims | None,
    check: bool,
) -> Traced:
    example = _Example.of(model, args, kwargs, batch_dims)
    front_ends = _front_ends(tracer)
    if check:
        _refuse_what_has_no_values(model, example)
    _refuse_what_cannot_be_traced(model, example)
    try:
        references = _references(example) if check else []
    except TraceError:
        raise
    except Exception as error:
        _explain_several_devices(model, error)
        raise

    reasons = []
    written = references[0].written if references else ""
    for name, front_end in front_ends.items():
        warning = ""
        try:
            traced = front_end(example)
            warning = traced.warning
            tolerance = 0.0 if name == "symbolic" else EXPORT_TOLERANCE
            with parameters_put_back(model) if written else nullcontext():
                _check(example, references, traced, tolerance)
                if references:
                    _check_gradients(example, references, traced)
            return traced
        except Exception as error:  # a front end runs the model's code: anything may come out
            reasons.append(f"  {name}: {_sentence(error)}{warning}")
            last = error
    if written:
        reasons.append(f"  It writes to its parameters: {written}")
    raise TraceError(
        f"no front end can trace {type(model).__name__}:\n"
        + "\n".join(reasons)
        + "\nChange the model at the lines named, wrap what cannot be traced in a function marked "
        "with torch.fx.wrap, or pass tracer=, a function (model, args, kwargs) -> fx.GraphModule."
    ) from last


# ------------------------------------------------------------------------------- the example inputs


@dataclass(frozen=True)
class _Example:
    """One call of the model, taken apart: tensors, which vary, and constants, which do not."""

    model: nn.Module
    names: list[str]  # of the tensors
    structure: Structure  # of (args, kwargs)
    tensors: list[Tensor]
    batch_dims: list[int | None]  # of the tensors

    @staticmethod
    def of(model: nn.Module, args: Args, kwargs: Kwargs, batch_dims: BatchDims | None) -> _Example:
        bound = bound_arguments(model, args, kwargs)
        tensors, structure = Structure.of((bound.args, bound.kwargs))
        dims = _infer_batch_dims(tensors) if batch_dims is None else list(batch_dims)
        if len(dims) != len(tensors):
            raise ValueError(
                f"batch_dims has {len(dims)} entries, but the inputs hold {len(tensors)} tensors: "
                "give one, an int or None, for each"
            )
        _, by_name = Structure.of(dict(bound.arguments))
        detached = [tensor.detach() for tensor in tensors]
        return _Example(model, _identifiers(by_name.paths()), structure, detached, dims)

    @property
    def batch(self) -> int | None:
        """The size of the batch, None if no input has one."""
        sizes = (
            t.shape[d] for t, d in zip(self.tensors, self.batch_dims, strict=True) if d is not None
        )
        return next(sizes, None)

    def resized(self, batch: int) -> list[Tensor]:
        """The tensors at another batch size: the first rows, or all of them over and over."""
        return [
            tensor
            if dim is None
            else tensor.index_select(
                dim, torch.arange(batch, device=tensor.device) % tensor.shape[dim]
            )
            for tensor, dim in zip(self.tensors, self.batch_dims, strict=True)
        ]

    def arguments(self, tensors: Sequence[Any]) -> tuple[Args, Kwargs]:
        """The call ``(args, kwargs)`` with these in place of the tensors."""
        args, kwargs = self.structure.fill(tensors)
        return args, kwargs

    def binder(self) -> Callable[[Args, Kwargs], list[Any]]:
        """``Traced.bind``; it does not keep the example's tensors alive."""
        model, structure = self.model, self.structure

        def bind(args: Args, kwargs: Kwargs) -> list[Any]:
            tensors, other = Structure.of(canonical(model, args, kwargs))
            if not structure.fits(other):
                raise TypeError("these inputs are built otherwise than the model was traced with")
            return tensors

        return bind

    def run(self, tensors: Sequence[Tensor], traced: Traced | None = None) -> _Result:
        """What the model, or its graph, does with these tensors; without effect on the model."""
        clones = [tensor.clone() for tensor in tensors]  # the model may write to its inputs
        with untouched(self.model), torch.no_grad():
            # Cloned, since an output may be a buffer, and buffers are about to be restored.
            results, structure = Structure.of(self.call(clones, traced))
            output = structure.fill(t.clone() if isinstance(t, Tensor) else t for t in results)
            return _Result(output, {n: b.clone() for n, b in self.model.named_buffers()})

    def gradients(self, tensors: Sequence[Tensor], traced: Traced | None = None) -> list[Tensor]:
        """The parameters' gradients, zero where there is none, of some scalar of the outputs."""
        with untouched(self.model), torch.inference_mode(False), torch.enable_grad():
            output = self.call([tensor.clone() for tensor in tensors], traced)
            outputs = [t for t in Structure.of(output)[0] if _has_gradient(t)]
            # Not the sum: that of a softmax, or of a normalised tensor, has no gradient.
            weights = [torch.arange(t.numel()).view(t.shape).to(t).cos() for t in outputs]
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            if not outputs or not parameters:
                return []
            gradients = torch.autograd.grad(
                outputs, parameters, weights, allow_unused=True, materialize_grads=True
            )
            return [g.to_dense() if g.is_sparse else g for g in gradients]

    def call(self, tensors: Sequence[Tensor], traced: Traced | None) -> Any:
        """The output of the model, or of its graph."""
        if traced is not None:
            # Not called as a module, since fx then prints what goes wrong to stderr.
            return traced.rebuild(traced.graph_module.forward(*tensors))
        args, kwargs = self.arguments(tensors)
        return called(self.model, args, kwargs)


def called(model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """The model's output; what it writes to its parameters is put back."""
    with skip.tracking(model), parameters_put_back(model):
        return model(*args, **kwargs)


@dataclass(frozen=True)
class _Result:
    """All that a forward pass leaves behind."""

    output: Any
    buffers: dict[str, Tensor]


def bound_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> inspect.BoundArguments:
    """The arguments by name, as ``model.forward`` takes them. Raises TypeError if it does not."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward(): {error}") from None


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _infer_batch_dims(tensors: Sequence[Tensor]) -> list[int | None]:
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.ndim)
    batch = sizes.most_common(1)[0][0] if sizes else None
    return [0 if tensor.ndim and tensor.shape[0] == batch else None for tensor in tensors]


def _constant_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return Tensor
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf  # the type as well: 1 == 1.0 == True


def _shape_key(tensor: Tensor, batch_dim: int | None) -> Hashable:
    sizes: list[int | None] = list(tensor.shape)
    if batch_dim is not None:
        sizes[batch_dim] = None
    return tensor.dtype, tuple(sizes)


def _identifiers(paths: Sequence[str]) -> list[str]:
    """Names for placeholders: the argument's, or the path of a tensor within one, ``ids_0``."""
    names: list[str] = []
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_")
        while name in names:
            name += "_"
        names.append(name)
    return names


def _refuse_what_has_no_values(model: nn.Module, example: _Example) -> None:
    own = dict((*model.named_parameters(), *model.named_buffers()))
    unset = [name for name, tensor in own.items() if tensor.is_meta]
    if unset:
        others = f" and {len(unset) - 1} others" if len(unset) > 1 else ""
        raise TraceError(
            f"{type(model).__name__} has parameters without values ({unset[0]}{others}): "
            'they are on the device "meta"; load the model ahead of compiling it, say by '
            'model.to_empty(device="cpu") and load_state_dict()'
        )
    for name, tensor in zip(example.names, example.tensors, strict=True):
        if tensor.is_meta:
            raise TraceError(
                f'the input {name} has no values: it is on the device "meta"; give one that has'
            )


def _refuse_what_cannot_be_traced(model: nn.Module, example: _Example) -> None:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise TraceError(
            f"{type(model).__name__} has parameters without a shape: run it once, so that its lazy "
            "modules make theirs"
        )
    if example.batch == 0:
        raise TraceError("the example batch is empty: give one with two rows or more")
    for _, leaf in leaves(example.arguments(example.tensors)):
        # A graph would keep an array as a constant, and repeat it at every call.
        if not isinstance(leaf, Tensor) and getattr(leaf, "ndim", 0) > 0:
            raise TraceError(
                f"an input is a {type(leaf).__name__}, whose values a graph cannot see: pass it as "
                "a tensor"
            )


def _explain_several_devices(model: nn.Module, error: Exception) -> None:
    """Raise ``TraceError`` where a model may have failed because it is on several devices."""
    where: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        where.setdefault(tensor.device, name)
    if len(where) > 1:
        raise TraceError(
            f"{type(model).__name__} is on several devices "
            f"({', '.join(f'{name} on {device}' for device, name in where.items())}) and does not "
            f"run as it is, {_first_line(error)}; move it to one, model.to(device): compiled, each "
            "stage is moved to its own"
        ) from error


# -------------------------------------------------------------------------------------- front ends


def _front_ends(tracer: str | CustomTracer) -> dict[str, Callable[[_Example], Traced]]:
    known: dict[str, Callable[[_Example], Traced]] = {"symbolic": _symbolic, "export": _export}
    if callable(tracer):
        return {"custom": partial(_custom, tracer)}
    if tracer == "auto":
        return known
    if tracer in known:
        return {tracer: known[tracer]}
    raise ValueError(
        f'tracer is {tracer!r}: give "auto", "symbolic", "export", or a function '
        "(model, args, kwargs) -> fx.GraphModule"
    )


class _SymbolicTracer(fx.Tracer):
    """fx's tracer, with one placeholder for each tensor of the example, and all else a constant.

    fx has a way of its own to fix arguments, ``concrete_args``; it leaves placeholders and
    assertions behind for them.
    """

    proxy_buffer_attributes = True  # else what a model computes from a buffer is computed only once

    def __init__(self, example: _Example) -> None:
        super().__init__()
        self.example = example
        self.hooked = {module for module in example.model.modules() if has_hooks(module)}
        self.rebuild: Callable[[Any], Any] = lambda output: output
        self.modes = Ambient.here()
        self.thread = threading.get_ident()

    # While fx traces, it has taken over nn.Module for the whole process: what other threads do is
    # none of our business.

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """A module with hooks is called as a whole, and so are its hooks."""
        return m in self.hooked or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if Ambient.here() != self.modes:
            raise _Refused(
                "it switches gradients or autocast on or off within its forward, which fx does "
                "not see"
            )
        node = super().create_node(*args, **kwargs)
        node.stack_trace = _stack_trace()
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        proxies = [self.create_proxy("placeholder", n, (), {}) for n in self.example.names]
        args, kwargs = self.example.arguments(proxies)

        def forward() -> Any:
            output = self.example.model.forward(*args, **kwargs)
            tensors, structure = Structure.of(output)
            if not structure.opens_objects:  # what it is made of is part of the graph
                return output
            self.rebuild = structure.fill
            return tensors

        return forward, []


def _stack_trace() -> str:
    """Where the model is, as Python says it. fx could say it too, and takes a millisecond."""
    lines: list[str] = []
    frame = sys._getframe(2)  # not this function, nor the tracer
    while frame.f_back is not None and frame.f_code is not _TRACE:
        if not frame.f_code.co_filename.startswith(_TORCH):
            lines.append(_stack_line(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return "".join(reversed(lines))


_TORCH = str(Path(torch.__file__).parent)
_TRACE = inspect.unwrap(fx.Tracer.trace).__code__


@lru_cache
def _stack_line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {text}\n'


@contextmanager
def _autograd_functions_as_nodes() -> Iterator[None]:
    """Keep autograd Functions whole: fx would look into their forward, and lose their backward.

    As with fx's own patches of ``nn.Module``, one model is traced at a time.
    """
    original = vars(torch.autograd.Function)["apply"]

    def apply(function: type, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original.__get__(None, function)(*args, **kwargs)

        proxy = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
        if proxy is None:
            return call(*args, **kwargs)
        # The printed code then reads ``round_1 = my_model_Round(x)``.
        call.__name__, call.__module__ = function.__name__, function.__module__
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _symbolic(example: _Example) -> Traced:
    model = example.model
    tracer = _SymbolicTracer(example)
    # Untouched, since fx leaves its constants on the model.
    with (
        untouched(model) as drew_random_numbers,
        _autograd_functions_as_nodes(),
        skip.tracking(model),
    ):
        graph = tracer.trace(model)
        if drew_random_numbers():
            raise _Refused(
                "it draws random numbers that do not depend on its inputs: fx freezes them"
            )
        graph_module = fx.GraphModule(model, graph, type(model).__name__)
    return Traced(graph_module, "symbolic", example.binder(), tracer.rebuild)


def _custom(tracer: CustomTracer, example: _Example) -> Traced:
    args, kwargs = example.arguments(example.tensors)
    with untouched(example.model):
        graph_module = tracer(example.model, args, kwargs)
    if not isinstance(graph_module, fx.GraphModule):
        raise _Refused(f"it returned a {type(graph_module).__name__}, not an fx.GraphModule")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example.tensors):
        raise _Refused(
            f"its graph has {len(placeholders)} placeholders for {len(example.tensors)} "
            f"input tensors ({', '.join(example.names)})"
        )
    graph_module.graph.set_codegen(fx.graph.CodeGen())
    graph_module.recompile()
    return Traced(graph_module, "custom", example.binder(), lambda output: output)


class _OnTensors(nn.Module):
    """The model as a function from tensors to tensors: export needs to know of nothing else."""

    def __init__(self, example: _Example, keep: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model = example.model
        self.training = example.model.training
        self.arguments = example.arguments
        self.keep = keep  # that of the output, which is made of its tensors alone

    def forward(self, *inputs: Tensor) -> list[Any]:
        args, kwargs = self.arguments(inputs)
        with skip.tracking(self.model):
            outputs, structure = Structure.of(self.model(*args, **kwargs))
        self.keep(structure)
        return outputs


_GUARDS = {
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def _export(example: _Example) -> Traced:
    hooked = [name for name, module in example.model.named_modules() if name and has_hooks(module)]
    if hooked:
        warnings.warn(
            f"hooks on {hooked[0]!r} ({len(hooked)} such modules) will not be called: the model is "
            'traced by torch.export, which leaves no modules; if it can be, use tracer="symbolic"',
            stacklevel=2,
        )
    # Export takes sizes 0 and 1 for constants, so that a batch must have two rows to be symbolic.
    tensors = example.tensors if example.batch != 1 else example.resized(2)
    dynamic = tuple(
        None if dim is None else {dim: torch.export.Dim.AUTO} for dim in example.batch_dims
    )
    structures: list[Structure] = []
    paths: dict[nn.Module, str] = {}  # of the modules that are kept whole
    first_error: Exception | None = None
    # With gradients: under no_grad, modules may choose kernels that have no backward.
    with (
        untouched(example.model),
        torch.inference_mode(False),
        torch.enable_grad(),
        _silent(),
        _conversions_only_where_needed(),
    ):
        while True:
            try:
                calls = whole.seen(paths, _runs(example)) if paths else {}
                with whole.kept_whole(paths, calls):
                    program = torch.export.export(
                        _OnTensors(example, structures.append),
                        tuple(tensor.clone() for tensor in tensors),
                        dynamic_shapes={"inputs": dynamic},
                        strict=False,
                    )
                break
            except Exception as error:
                first_error = first_error or error
                paths = whole.more(example.model, paths, error) or {}
                if not paths:
                    raise first_error from None
    largest = _largest_batch(program, example.batch or 0)
    exported = program.module(check_guards=False)
    graph_module = _on_the_model(exported, example, calls)
    warning = _fixed_batch(program)
    return Traced(graph_module, "export", example.binder(), structures[-1].fill, largest, warning)


def _runs(example: _Example) -> Iterator[Callable[[], Any]]:
    """Runs of the model at the batch sizes that it takes, of a few."""
    batch = example.batch
    for size in [2] if batch is None else sorted({max(batch, 2), batch + 1, batch + 3}):
        tensors = example.resized(size)
        try:
            with untouched(example.model):
                example.call([tensor.clone() for tensor in tensors], None)
        except Exception:  # it does not take this one
            continue
        yield partial(example.call, [tensor.clone() for tensor in tensors], None)


@contextmanager
def _silent() -> Iterator[None]:
    """What stands in export's way comes as an exception; it is not to be logged and printed too."""
    names = [n for n in logging.root.manager.loggerDict if n.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _conversions_only_where_needed() -> Iterator[None]:
    """A module that is converted to the dtype and device that it has is left alone.

    Otherwise its parameters, which export has replaced by fakes, would be replaced again.
    """
    original = nn.Module._apply

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        kinds = {
            (t.dtype, t.device): fn(torch.empty(0, dtype=t.dtype, device=t.device)) for t in tensors
        }
        if all((t.dtype, t.device) == kind for kind, t in kinds.items()):
            return self
        return original(self, fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _largest_batch(program: torch.export.ExportedProgram, batch: int) -> int:
    """The largest batch that the graph is for: a model that branches on its batch size is exported
    as one branch. Raises ``_Refused`` if that does not hold for all smaller ones too."""
    largest = sys.maxsize
    for symbol, sizes in program.range_constraints.items():
        if not str(symbol).startswith("s"):  # others, "u0", stand for values read from tensors
            continue
        upper = int(sizes.upper) if sizes.upper < torch.iinfo(torch.int32).max else sys.maxsize
        if sizes.lower > 2 or upper < batch:
            raise _Refused(
                "it branches on its batch size: "
                f"the graph holds from {sizes.lower} to {sizes.upper} only"
            )
        largest = min(largest, upper)
    return largest


def _fixed_batch(program: torch.export.ExportedProgram) -> str:
    """Where the model made a constant of its batch size, "" if it did not."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    for guard in getattr(mode and mode.shape_env, "guards", ()):
        size = guard.expr.args[-1] if guard.expr.is_Equality else None
        frame = guard.sloc.framework_loc
        if getattr(size, "is_Integer", False) and isinstance(frame, traceback.FrameSummary):
            return f"; the batch size is fixed at {size} by {_at(frame)}"
    return ""


def _on_the_model(
    exported: fx.GraphModule, example: _Example, calls: dict[str, whole.Call]
) -> fx.GraphModule:
    """The exported graph on the model's own tensors, by the model's own names, without guards."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    names = iter(example.names)
    for node in sorted(exported.graph.nodes, key=lambda node: node.op != "placeholder"):
        if node.target in _GUARDS:
            continue
        if node.op == "placeholder":
            name = next(names)
            copies[node] = graph.create_node("placeholder", name, name=name)
        elif node.op == "get_attr":
            target = str(node.target).removeprefix("model.")
            try:
                attributes[target] = operator.attrgetter(target)(example.model)
            except AttributeError:  # a constant, or a no_grad region: made by export
                attributes[target] = operator.attrgetter(str(node.target))(exported)
            copies[node] = graph.create_node("get_attr", target, name=target.replace(".", "_"))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = _without_wrapper(node.meta)
    graph.eliminate_dead_code()  # what guards looked at, and all but one name of tied parameters
    attributes |= whole.as_modules(graph, calls)
    return fx.GraphModule(attributes, graph, type(example.model).__name__)


def _without_wrapper(meta: dict[str, Any]) -> dict[str, Any]:
    """A node's metadata with the module names of the model, not of ``_OnTensors``."""
    if not meta.get("nn_module_stack"):
        return dict(meta)
    stack = {
        key: (path.removeprefix("model").removeprefix("."), kind)
        for key, (path, kind) in meta["nn_module_stack"].items()
        if path
    }
    return {**meta, "nn_module_stack": stack}


# ---------------------------------------------------------------------------------- checks and care


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Run or trace the model without a trace: attributes, buffers and random states are put back,
    and hooks are not called, other than PyTorch's own (old parametrizations, which make weights).

    Yields a function that says whether random numbers have been drawn since.
    """
    attributes: list[dict[Any, Any]] = [vars(module) for module in model.modules()]
    attributes += [d for owner in attributes for d in owner.values() if isinstance(d, dict)]
    attributes += [p._backward_hooks for p in model.parameters() if p._backward_hooks]
    saved_attributes = [(owner, dict(owner)) for owner in attributes]
    tensors = [
        value
        for owner in attributes
        for value in owner.values()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta
    ]
    saved_tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
    own = (*model.parameters(), *tensors)
    devices = {t.device for t in own if t.device.type not in ("cpu", "meta")}
    generators = [(torch.get_rng_state, torch.set_rng_state)]
    for device in devices:
        backend = torch.get_device_module(device)
        generators.append(
            (partial(backend.get_rng_state, device), partial(backend.set_rng_state, device=device))
        )
    states = [get() for get, _ in generators]
    python_state = random.getstate()

    def drew_random_numbers() -> bool:
        same = all(torch.equal(get(), s) for (get, _), s in zip(generators, states, strict=True))
        return not same or random.getstate() != python_state

    try:
        on_parameters = [p._backward_hooks for p in model.parameters() if p._backward_hooks]
        for hooks in (*on_parameters, *(h for m in model.modules() for h in _hooks(m))):
            for key in [key for key, hook in hooks.items() if not _is_torchs(hook)]:
                del hooks[key]
        yield drew_random_numbers
    finally:
        for owner, saved in saved_attributes:
            if owner.keys() != saved.keys() or any(owner[k] is not saved[k] for k in saved):
                owner.clear()
                owner.update(saved)
        with torch.no_grad():
            for tensor, value in saved_tensors:
                # A write makes a backward fail that has the buffer saved: none without need.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for (_, put), state in zip(generators, states, strict=True):
            put(state)
        random.setstate(python_state)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to know of the module's calls, or of their backward."""
    return any(not _is_torchs(hook) for hooks in _hooks(module) for hook in hooks.values())


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def _is_torchs(hook: Any) -> bool:
    maker = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(maker.__module__).startswith("torch.")


@contextmanager
def parameters_put_back(model: nn.Module) -> Iterator[dict[str, _Write]]:
    """Yields the first write to each parameter that gets written to, by its name, and puts back
    what was there."""
    saved: dict[str, _Write] = {}
    try:
        with _Writes(model, saved):
            yield saved
    finally:
        for name, write in saved.items():
            model.get_parameter(name).data.copy_(write.before)


@dataclass(frozen=True)
class _Write:
    before: Tensor
    where: str  # the line


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves each parameter just ahead of the first operator that writes to it."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, saved: dict[str, _Write]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = saved
        self.parameters = {
            p.untyped_storage()._cdata: (name, p)
            for name, p in model.named_parameters()
            if p.layout == torch.strided
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                value = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(value if isinstance(value, list | tuple) else [value])
        return func(*args, **(kwargs or {}))

    def _save(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                name, owner = self.parameters.get(tensor.untyped_storage()._cdata, (None, None))
                if name is not None and owner is not None and name not in self.saved:
                    frames = [f for f in _since(called) if _is_of_a_model(f)]
                    where = _at(frames[-1]) if frames else "a module of PyTorch"
                    self.saved[name] = _Write(owner.detach().clone(), where)


@dataclass(frozen=True)
class _Reference:
    """What the model does at one batch size."""

    tensors: list[Tensor]
    result: _Result
    where: str
    written: str | None = None  # a parameter that it writes to, and where


def _references(example: _Example) -> list[_Reference]:
    """The model's own runs, at the example's batch size and at those others that it takes.

    Raises what the model raises at the example's size.
    """
    batch = example.batch
    with parameters_put_back(example.model) as written:
        result = example.run(example.tensors)
    if written:
        _refuse_what_is_done_once(example)
    where = next((f"{name}, by {w.where}" for name, w in written.items()), None)
    references = [_Reference(example.tensors, result, "on the example", where)]
    # Micro-batches are smaller, later batches may be larger; a size that got fixed shows at either.
    sizes = set() if batch is None else {1, batch // 2, batch + 1} - {0, batch}
    for size in sorted(sizes, reverse=True):
        tensors = example.resized(size)
        try:
            result = example.run(tensors)
        except Exception:  # it only takes some sizes, or this is no batch: nothing to compare
            continue
        references.append(_Reference(tensors, result, f"at batch size {size}"))
    return references


def _refuse_what_is_done_once(example: _Example) -> None:
    """A graph would write to the parameters at every call."""
    written = []
    with untouched(example.model), torch.no_grad():
        for _ in range(2):
            with parameters_put_back(example.model) as saved:
                example.call([tensor.clone() for tensor in example.tensors], None)
            written.append({name: write.where for name, write in saved.items()})
    if written[0].keys() != written[1].keys():
        name, where = next(iter(written[0].items()))
        raise TraceError(
            f"{type(example.model).__name__} writes to its parameters ({name}, by {where}) when it "
            f"is first called in {'train' if example.model.training else 'eval'} mode, and not "
            "later: call it once in this mode ahead of compiling it"
        )


def _check(
    example: _Example, references: list[_Reference], traced: Traced, tolerance: float
) -> None:
    """Raise ``_Refused`` unless the graph does what the model does, to its buffers too."""
    for reference in references:
        try:
            result = example.run(reference.tensors, traced)
        except Exception as error:
            raise _Refused(f"its graph fails {reference.where}: {_first_line(error)}") from error
        for name, expected, actual in (
            ("output", reference.result.output, result.output),
            ("buffers", reference.result.buffers, result.buffers),
        ):
            difference = _difference(expected, actual, tolerance)
            if difference:
                raise _Refused(f"its graph differs {reference.where}: {name}: {difference}")


def _check_gradients(example: _Example, references: list[_Reference], traced: Traced) -> None:
    """Raise ``_Refused`` if the graph has other gradients than the model.

    A front end that looks into a ``torch.autograd.Function`` sees its forward only.
    """
    tensors = references[-1].tensors  # the smallest batch
    try:
        expected = example.gradients(tensors)
    except Exception:  # a model without a backward: nothing to compare
        return
    actual = example.gradients(tensors, traced)
    if len(expected) != len(actual):
        raise _Refused("no gradient flows through its graph")
    scale = max((g.abs().max().item() for g in expected if g.numel()), default=0.0)
    names = [name for name, p in example.model.named_parameters() if p.requires_grad]
    for name, gradient, other in zip(names, expected, actual, strict=False):
        tolerance = max(GRADIENT_TOLERANCE, 32 * torch.finfo(gradient.dtype).eps) * scale
        if gradient.numel() and (gradient - other).abs().max().item() > tolerance:
            raise _Refused(f"its graph has another gradient for {name}")


def _difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    """How two values of any structure differ; None if they do not."""
    parts, spec = pytree.tree_flatten(expected)
    others, other_spec = pytree.tree_flatten(actual)
    if spec != other_spec:
        return f"{_structure(actual)} in place of {_structure(expected)}"
    for leaf, other in zip(parts, others, strict=True):
        difference = _leaf_difference(leaf, other, tolerance)
        if difference:
            return difference
    return None


def _leaf_difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    if type(expected) is not type(actual):
        return f"a {type(actual).__name__} in place of a {type(expected).__name__}"
    if isinstance(expected, Tensor):
        return _tensor_difference(expected, actual, tolerance)
    if is_opened(expected):
        return _difference(list(leaves(expected)), list(leaves(actual)), tolerance)
    return None if expected == actual else f"{actual!r} in place of {expected!r}"


def _tensor_difference(expected: Tensor, actual: Tensor, tolerance: float) -> str | None:
    if expected.device.type != "cpu":
        tolerance = max(tolerance, EXPORT_TOLERANCE)  # kernels there may not repeat themselves
    scale = 0.0
    if tolerance and expected.is_floating_point() and expected.numel():
        tolerance = max(tolerance, 8 * torch.finfo(expected.dtype).eps)
        scale = torch.nan_to_num(expected, posinf=0.0, neginf=0.0).abs().max().item()
    try:
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _structure(value: Any) -> str:
    """A value's outermost type, with its keys or its length."""
    name = type(value).__name__
    if isinstance(value, dict):
        return f"{name} of {', '.join(map(str, value))}"
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name


def _first_line(error: BaseException) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return "which way it goes depends on the values of tensors"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = textwrap.shorten(lines[0], 240, placeholder=" ...") if lines else "(no message)"
    return text if isinstance(error, _Refused) else f"{type(error).__name__}: {text}"


def _sentence(error: BaseException) -> str:
    """One line: what went wrong, and the last line of the model's code that was running then."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_of_a_model(f)]
    text = _first_line(error)
    return f"{text} (at {_at(frames[-1])})" if frames else text


def _is_of_a_model(frame: traceback.FrameSummary) -> bool:
    not_the_model = (str(Path(torch.__file__).parent), __file__, whole.__file__, "<")
    return not frame.filename.startswith(not_the_model) and bool(frame.line)


def _since(function: Callable[..., Any]) -> list[traceback.FrameSummary]:
    """What is running now, from the last call of a function on."""
    stack = traceback.extract_stack()
    code = function.__code__
    calls = [
        i for i, f in enumerate(stack) if (f.filename, f.name) == (code.co_filename, code.co_name)
    ]
    return stack[calls[-1] + 1 :] if calls else stack


def _at(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
