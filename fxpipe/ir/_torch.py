"""Every name that is private to PyTorch and that fxpipe or passes use, with what it is for.

A name is private if a part of it begins with one underscore: ``torch._C``, ``Tensor._version``.
PyTorch may change these in any release, so no other file of fxpipe or passes uses one, which a test
asserts; and ``tests/fxpipe/ir/test_torch.py`` asserts of each that it still does what is said here.

Two kinds of names with underscores are used elsewhere. ``_parameters``, ``_buffers``, ``_modules``
and the dictionaries of hooks of an ``nn.Module``, and ``nn.Module._apply``, are what subclasses and
pickles of modules have relied on since PyTorch 0.1. ``torch.ops.aten._name`` is an operator, which
stands in graphs under this name.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, overrides

# The kinds of functorch transforms, such as grad and vmap.
from torch._C._functorch import TransformType

# A context in which PyTorch's kernels in Python run, which need no values where those in C++ do.
from torch._dispatch.python import enable_python_dispatcher

# The two functions that stand in a graph of torch.export for a torch.vmap.
from torch._functorch import predispatch

# By these Dynamo tells a compiler of graphs the mode of its fake inputs.
from torch._guards import TracingContext, tracing

# The function that torch.export's graphs call in place of a torch.autocast.
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

# The definitions of operators that are written in Python, by their names.
from torch._library.custom_ops import OPDEFS

# The type of the operators in the graphs of torch.export.
from torch._ops import OpOverload

# Tensors without values, on which graphs are examined; the exceptions say that values are needed.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# The tensors that torch.export traces with: a value of this type shows that it is being traced.
from torch._subclasses.functional_tensor import FunctionalTensor

# Describes a tensor for the fake that is made of it.
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.amp import GradScaler
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx._symbolic_trace import _Patcher, _wrapped_fns_to_patch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The registry of containers that torch.export and Hugging Face register their types with.
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# The torch function mode of ``torch.device`` and ``torch.set_default_device``.
from torch.utils._device import DeviceContext

# A mode sees every operator that a computation calls; PyTorch's tutorials import it from here.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# The functions of sizes in the conditions of torch.export: divisions that round, for one.
from torch.utils._sympy import functions as size_functions

__all__ = [
    "DataDependentOutputException",
    "DeviceContext",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "OpOverload",
    "TorchDispatchMode",
    "TransformType",
    "enable_python_dispatcher",
    "pytree",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
]

# ---------------------------------------------------------------------------- values and operators


def schema_of(target: Any) -> Any:
    """The schema of an operator, which says what it writes to; None for what is no operator."""
    return getattr(target, "_schema", None)


def function_of_operator(operator: OpOverload) -> Any:
    """The function in Python that defines an operator (``torch.library.custom_op``); None for any
    other operator."""
    definition = OPDEFS.get(str(operator.name()))  # type: ignore[no-untyped-call]
    return None if definition is None else definition._init_fn


def is_wrapped(function: Any) -> bool:
    """Whether a function of the user's has been given to ``torch.fx.wrap``, so that a graph may
    call it."""
    key = id(getattr(function, "__globals__", None)), getattr(function, "__name__", "")
    return key in _wrapped_fns_to_patch


def is_kernel(function: Any) -> bool:
    """Whether a function is ``torch.add``, say: one that calls an operator, and nothing else."""
    name = getattr(function, "__qualname__", "")
    return isinstance(function, BuiltinFunctionType) and name.startswith("_VariableFunctions")


def version_of(tensor: Tensor) -> int:
    """How many times a tensor has been written to in place: autograd's own count.

    Raises RuntimeError for tensors made under ``torch.inference_mode``, which have none.
    """
    return tensor._version


IS_VIEW, IS_ZERO, TYPED_STORAGE = "_is_view", "_is_zerotensor", "_typed_storage"
VERSION, BASE = "_version", "_base"
"""What a model may ask a tensor of its history and its memory, by no operator: three methods, and
two properties."""


def alias_below_autograd(tensor: Tensor) -> Tensor:
    """An alias of a tensor without history, made where a dispatch mode sees an operator. There
    ``detach`` by itself gives an alias that does not see what is written to the tensor later: the
    two would have a count of their own each (:func:`version_of`)."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another, so that it cannot be detached in
    place."""
    return tensor._is_view()


def viewed(tensor: Tensor) -> Tensor:
    """The tensor of which autograd takes another one for a view; the other one itself if it is no
    view."""
    return tensor if tensor._base is None else tensor._base


def gradient_kinds(node: Any) -> list[tuple[Any, torch.dtype, torch.device]]:
    """The shape, dtype and device of each gradient that a node of an autograd graph takes. A nested
    tensor has no shape: what is given in its place equals no shape."""
    return [
        (object() if each.is_nested_tensor else tuple(each.shape), each.dtype, each.device)
        for each in node._input_metadata
    ]


def memory_number(tensor: Tensor) -> int:
    """A number that stands for the memory of a strided tensor, the same for all its views.

    ``data_ptr()`` does not: it is 0 for all fake tensors and for all tensors without elements.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def exchange(tensor: Tensor, new: Tensor) -> None:
    """Let a tensor have the memory, dtype and device of another one, and stay the same object, with
    its attributes and hooks; ``new`` is of no use afterwards.

    ``tensor.data = new`` refuses to take a tensor from "meta" to a device.
    ``torch.utils.swap_tensors`` would exchange attributes and hooks as well, and it refuses tensors
    with weak references to them, which every fake tensor mode has made.
    """
    new.requires_grad_(tensor.requires_grad)
    hooks = gradient_hooks(tensor)
    torch._C._swap_tensor_impl(tensor, new)
    if any(hooks):  # known to the autograd metadata as well, which ``new`` has taken along
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


def wrapper_tensor(
    kind: type[Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Any:
    """A tensor of a subclass, with a shape and a dtype, but without memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` for tensor subclasses that see operators in ``__torch_dispatch__``
only."""


def stored_values(tensor: Tensor) -> int:
    """How many values a sparse tensor stores, without making it coalesced."""
    return tensor._nnz()


def disable_current_modes() -> Any:
    """A context in which no dispatch mode of this thread, such as a fake tensor mode, is active."""
    return _disable_current_modes()


# ------------------------------------------------------------- what is active in the running thread


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """The torch function modes that are active in this thread, the outermost first."""
    return tuple(overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def exchange_function_modes(modes: tuple[TorchFunctionMode, ...]) -> None:
    """Replace the torch function modes that are active in this thread by these.

    They are not entered as context managers: they have been entered already where they were made,
    and the mode of a default device, when it is entered, sets a variable of the whole process.
    """
    for _ in function_modes():
        overrides._pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def has_dispatch_modes() -> bool:
    """Whether a torch dispatch mode is active in this thread."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_intercepting() -> bool:
    """Whether a torch function mode, a torch dispatch mode, a functorch transform or a level of
    forward mode is active in this thread. This takes less time than to list any of them."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


DisableTorchFunction = torch._C.DisableTorchFunction
"""A context in which functions of torch call neither ``__torch_function__`` of tensor subclasses,
nor torch function modes."""

EnableTorchFunction = torch._C._EnableTorchFunction
"""A context that undoes the effect of a :data:`DisableTorchFunction` around it."""


def asks_torch_function() -> bool:
    """Whether, in this thread, functions of torch call ``__torch_function__`` of subclasses."""
    return torch._C._is_torch_function_enabled()


def is_forward_mode() -> bool:
    """Whether tangents are computed along with values: within a ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def has_tangent(value: object) -> bool:
    """Whether a value is a dual tensor of the ``forward_ad.dual_level`` that is open."""
    if not isinstance(value, Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def transforms() -> list[TransformType]:
    """The functorch transforms that run in this thread, the outermost first."""
    return [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]


SavedTensorsHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The two hooks that ``torch.autograd.graph.saved_tensors_hooks`` takes: pack and unpack."""


def saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The hooks on saved tensors that are active in this thread, of several the innermost ones."""
    top: SavedTensorsHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def pop_saved_tensors_hooks() -> None:
    """Deactivate the innermost hooks on saved tensors."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensors_hooks(hooks: SavedTensorsHooks) -> None:
    """Activate hooks on saved tensors, as the innermost ones."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


# --------------------------------------------------------------------------------------- backwards


def running_backward() -> int:
    """The autograd engine's number of the backward that this thread is part of; -1 outside."""
    return torch._C._current_graph_task_id()


class _NoValues(dict[Any, Any]):
    """What has been cached of parametrizations, of which one thread finds and leaves nothing."""

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__()
        self.known, self.thread = known, threading.get_ident()

    def get(self, key: Any, default: Any = None) -> Any:
        is_ours = threading.get_ident() == self.thread
        return default if is_ours else self.known.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if threading.get_ident() != self.thread:
            self.known[key] = value


@contextmanager
def parametrizations_computed() -> Iterator[None]:
    """Inside the ``with`` block this thread computes each parametrized tensor whenever it is read,
    also within ``torch.nn.utils.parametrize.cached()``: a value of the user's own run has no place
    in a trace, nor one of a trace in the user's run."""
    module: Any = parametrize
    module._cache = own = _NoValues(module._cache)
    try:
        yield
    finally:
        # Another thread may have put its own in front, and the user's ``cached()`` may have ended.
        above = module._cache
        if above is own:
            module._cache = own.known
        while isinstance(above, _NoValues):
            if above.known is own:
                above.known = own.known
            above = above.known


def is_in_a_group() -> bool:
    """Whether the running backward is one of several that share what checkpoints recompute: within
    ``torch.utils.checkpoint.GraphExecGroup``, which PyTorch 2.11 may not have."""
    group = getattr(torch._C, "_get_graph_exec_group", None)
    return group is not None and group() is not None


def non_reentrant_generator() -> tuple[str, bool]:
    """The name of the function of ``torch.utils.checkpoint`` which every checkpoint that is not
    reentrant calls, and whether it takes its settings by name, as it does from PyTorch 2.15 on."""
    name = "_checkpoint_without_reentrant_generator"
    is_by_name = hasattr(torch.utils.checkpoint, f"{name}_impl")
    return f"{name}_impl" if is_by_name else name, is_by_name


_WITHOUT_OWN_BACKWARD = {Tensor, torch.nn.Parameter, torch.autograd.graph.GradientEdge}


def run_backward(
    roots: tuple[Any, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[Any, ...] = (),
    *,
    retain_graph: bool = False,
    accumulate: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run the autograd engine, as ``torch.autograd.backward`` and ``torch.autograd.grad`` do.

    Those functions first check their arguments, and make gradients for roots that have none. For a
    small layer this takes longer than the engine does.

    Args:
        roots: the tensors, or edges of the graph (``GradientEdge``), at which the backward starts.
        grads: the gradient of each root, of the root's shape.
        inputs: compute gradients for these only; by default for all leaves.
        accumulate: whether gradients are added to ``.grad``. If not, they are returned, and a
            RuntimeError is raised if the backward does not reach one of the inputs.
    """
    if not {*map(type, roots), *map(type, inputs)} <= _WITHOUT_OWN_BACKWARD:
        # A subclass of Tensor may have a backward of its own.
        if not accumulate:
            return torch.autograd.grad(roots, inputs, grads, retain_graph=retain_graph)
        torch.autograd.backward(roots, grads, inputs=inputs or None, retain_graph=retain_graph)
        return ()
    engine = torch.autograd.graph._engine_run_backward
    return engine(
        roots,
        grads,
        retain_graph,
        False,  # no graph of the backward itself
        inputs,
        allow_unreachable=accumulate,
        accumulate_grad=accumulate,
    )


BACKWARDS: ModuleType = torch.autograd
RUN_BACKWARD = "_engine_run_backward"
"""The function of that module by which ``torch.autograd.backward`` and ``grad`` run the engine.
Torch function modes are asked about these two, so that a mode that lets them run is not active in
what hooks and checkpoints compute in the backward."""

Function = TypeVar("Function", bound=type[torch.autograd.Function])


def node_type(function: type) -> Any:
    """The type of the autograd nodes that calls of a ``torch.autograd.Function`` make."""
    return function._backward_cls  # type: ignore[attr-defined]


def lean(function: Function) -> Function:
    """Let an autograd function be called without the checks of each call of ``Function.apply``, and
    of each call of its backward. A decorator of the function's class.

    For functions that do hardly anything, those checks take longer than the rest: ``apply`` looks
    for a ``setup_context`` and for functorch's wrappers, and the backward looks for a ``vjp``. Such
    a function has neither of the two. Under functorch's transforms it is called as any other.
    """
    checked: Callable[..., Any] = function.apply
    quick = torch._C._FunctionBase.__dict__["apply"].__get__(None, function)
    are_transforms_active = torch._C._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        return checked(*args) if are_transforms_active() else quick(*args)

    function.apply = staticmethod(apply)  # type: ignore[method-assign]
    node_type(function).apply = function.backward
    return function


def after_backward(callback: Callable[[], None]) -> None:
    """Let the autograd engine call a function at the end of the running backward, as FSDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_sequence_number(node: torch.autograd.graph.Node, number: int) -> None:
    """Let the autograd engine take a node as if it had been made as the ``number``-th of its
    thread: of nodes that are ready it takes the one with the highest number first."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """The place of a node in the order in which its thread has made nodes. Of nodes that are ready
    the autograd engine takes the one with the highest number first."""
    number: int = node._sequence_nr()
    return number


def next_sequence_number() -> int:
    """The sequence number that the next node gets which this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def results_of(node: torch.autograd.graph.Node) -> list[torch.autograd.graph.GradientEdge]:
    """The edges at which the gradients of a node's results arrive, one for each result."""
    count = len(node._input_metadata)
    return [torch.autograd.graph.GradientEdge(node, i) for i in range(count)]


def gradient_hooks(tensor: Tensor) -> tuple[Any, Any]:
    """A tensor's hooks on its gradient, and its hooks that run once that has been accumulated.

    Each is a dictionary, or None.
    """
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


# ------------------------------------------------------------------------------ modules, optimizers

BatchNorm = _BatchNorm
InstanceNorm = _InstanceNorm
"""The base classes of the batch norms, and of the instance norms, of all numbers of dimensions."""

ConvNd = _ConvNd
"""The base class of the convolutions of all numbers of dimensions."""

RESETS = "reset_parameters", "_reset_parameters"
"""The methods by which modules of PyTorch initialise their parameters; ``nn.MultiheadAttention``
has the second one."""

FLAT_WEIGHTS = "_flat_weights"
"""The attribute of recurrent modules with their parameters, which their forward takes from it."""


def any_global_module_hook() -> bool:
    """Whether a hook is registered globally, which runs at the calls of all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def step_hooks(optimizer: Optimizer) -> tuple[Collection[Any], ...]:
    """The hooks that run before and after an optimizer's step: the optimizer's, and global ones."""
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


def infs_found(scaler: GradScaler, optimizer: Optimizer | None) -> dict[torch.device, Tensor]:
    """What a scaler has noted of an optimizer's gradients when it unscaled them: by device 1.0 if
    some are inf or NaN, else 0.0. It reads this in ``step`` and, for all optimizers, in ``update``,
    which needs an entry: a process without an optimizer (None) may make one."""
    found: dict[torch.device, Tensor]
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has made a step, or they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


VALIDATE_ARGS = "_validate_args"
"""The attribute of ``Distribution`` that says whether values of parameters are looked at.

``Distribution.set_default_validate_args`` sets it, and nothing public tells what it was before.
"""


# ----------------------------------------------------------------------- what traces have in them

CALL = "_call_impl"
"""The method by which ``nn.Module.__call__`` runs a module's hooks and forward. fxpipe patches it
to know which module runs: fx and torch.export patch ``__call__``, and skip other patches of it."""

SingleLevelFunction = _SingleLevelFunction
"""The base class of ``torch.autograd.Function``; ``Function.apply`` calls its ``apply``."""

FxPatcher = _Patcher
"""The class by whose ``patch_method(cls, name, new)`` fx, while it traces, replaces methods for all
threads."""

EXPORT: ModuleType = importlib.import_module("torch.export._trace")
WITHOUT_BACKENDS = "_ignore_backend_decomps"
"""The function of that module whose context torch.export enters to trace without oneDNN and cuDNN:
it switches them off for all threads. The graphs that fxpipe exports, of operators ahead of
autograd, do not depend on that, so fxpipe replaces it."""

LazyGraphModule = _LazyGraphModule
"""A GraphModule whose code is written, and compiled by Python, when it is first needed, and not
each time that the graph is set: some graphs are read and never run."""
GRAPH_MODULES: ModuleType = importlib.import_module("torch.fx._lazy_graph_module")
GRAPH_MODULE_CLASS = "_get_graph_module_cls"
"""The function of that module that gives the class of the graph that torch.export records. Its
passes have the code written anew after each of them."""

PROXIES: ModuleType = importlib.import_module("torch.fx.experimental.proxy_tensor")
TENSOR_METADATA = "_extract_tensor_metadata"
"""The function of that module by which torch.export describes the value of each node once more, as
``meta["tensor_meta"]``, beside the fake value ``meta["val"]`` from which it takes all that it says.
Nothing needs both, and this takes some percent of the time of an export."""

TensorDescriber = MetaTensorDescriber
DESCRIBE = "describe_tensor"
"""The class by whose method of this name every fake tensor mode describes a tensor, of which it
then makes a fake. The description, a dataclass, has the ``device`` that the fake says it is on."""

EXPORTS_FAKES: ModuleType = importlib.import_module("torch._export.non_strict_utils")
EXPORTS_MODE = "FakeTensorMode"
"""The class that torch.export, as that module knows it, makes the mode of its fake tensors of."""

ASSERT = torch._assert
"""The assertion that models make, as a function, to be traced by fx. It takes the truth value of a
tensor on the host."""

ASSERT_ASYNC = torch._assert_async
"""The assertion that checks the truth value of a tensor on its device, so that the host does not
wait. Its operator in graphs that are exported has the overloads ``default`` and ``msg``."""

SOURCE_OF_GUARD = "_get_sloc"
"""The method of a ``ShapeEnv`` that tells which line of code a guard comes from."""


SIZE_FUNCTIONS: dict[str, Any] = {
    name: value
    for name, value in vars(size_functions).items()
    if isinstance(value, type) and value.__module__ == size_functions.__name__
}
"""The functions of sizes that a condition of torch.export may have, beside those of sympy."""

KERNELS: ModuleType = torch._C
CONVOLUTION_KERNEL = "_select_conv_backend"
"""The function of that module that chooses the kernel of a convolution. It compares sizes, and
torch.export makes conditions of these comparisons, although all kernels compute the same."""
_CONVOLUTION_DIMENSIONS = {4: "2d", 5: "3d"}


def formats_of_convolution(x: Tensor, weight: Tensor) -> set[torch.memory_format]:
    """The memory formats that the kernels of the CPU give to the result of a convolution of ``x``.
    There is only one where the choice of the kernel does not matter for strides."""
    if x.dim() == 3:  # kernels for two dimensions do it, on a contiguous input
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    kernels: Any = KERNELS.__dict__["_ConvBackend"]  # PyTorch's type stubs have another name
    dims = _CONVOLUTION_DIMENSIONS[x.dim()]
    names = ("Mkldnn", f"Slow{dims}", f"SlowDilated{dims}", f"SlowTranspose{dims}")
    determine = torch._C._conv_determine_backend_memory_format
    return {determine(x, weight, getattr(kernels, name)) for name in names}


@contextmanager
def at_most_guards(count: int) -> Iterator[None]:
    """Inside the ``with`` block, torch.export makes a constant of a size that takes part in more
    guards than ``count``. Simplifying a guard takes the longer the more guards there are."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    with config.patch(symbol_guard_limit_before_specialize=count):
        yield


def first_symbol(size: torch.SymInt) -> Any:
    """The symbol (of sympy) that a size was given first, whatever it has been found to equal."""
    return size.node._expr


@contextmanager
def lost_tensors_as_constants() -> Iterator[None]:
    """Inside the ``with`` block, torch.export returns programs that have fake tensors as constants.

    Such a constant is a tensor of which the export has lost track. By default it raises an error
    that tells only in its text which module the tensor belongs to; the name of the constant, in
    ``ExportedProgram.constants``, says it too: the module's path, and ``lifted_tensor_0``. The
    warning in place of the error is ignored, since whoever uses this context looks for constants.
    So is the one that a forward assigns attributes, with the advice to make buffers of them: what
    a forward changes is told of by :mod:`fxpipe.trace.state`, and what it assigns ahead of its use
    need not be told of. (Recurrent modules make the lists of their parameters anew while an export
    has other tensors in the place of these.)
    """
    config: Any = importlib.import_module("torch._export.config")
    with warnings.catch_warnings(), config.patch(error_on_lifted_constant_tensors=False):
        warnings.filterwarnings("ignore", "We found a fake tensor in the exported program")
        assigned = r"The tensor attributes? (\S+ )+(was|were) assigned during export"
        warnings.filterwarnings("ignore", assigned)
        yield


TRANSFORM_BEGINS: dict[Any, str] = {predispatch._vmap_increment_nesting: "vmap"}
TRANSFORM_ENDS: set[Any] = {predispatch._vmap_decrement_nesting}
"""What torch.export leaves of a ``torch.vmap``, and in later versions of a ``torch.func.jvp``, in
its graphs: a call where it begins and ends."""
if hasattr(predispatch, "_jvp_increment_nesting"):
    TRANSFORM_BEGINS[predispatch._jvp_increment_nesting] = "jvp"
    TRANSFORM_ENDS.add(predispatch._jvp_decrement_nesting)

SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
"""What Dynamo leaves of ``torch.no_grad``, ``torch.enable_grad`` and ``torch.autocast``."""


def rename(node: fx.Node, name: str) -> None:
    """Give a node of a graph another name, made unique within the graph."""
    node._rename(name)


class OuterModule(fx.GraphModule):
    """A graph module that contains others and that, unlike fx's, does not recompile these when it
    is recompiled: only its own graph has changed."""

    def _recompile_submodules(self) -> list[Any]:
        return []


# ------------------------------------------------------------------------------------- distributed


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """How long the ranks of a group wait for each other when they exchange tensors of ``device``.

    PyTorch takes a timeout when a group is made, and does not give it back. Groups that are made
    beside a group of the user's have to wait as long as that one does.
    """
    found: timedelta = group._get_backend(device).options._timeout
    return found


def store_of_ranks() -> Any:
    """The store of the default process group, by which ranks can tell each other something while
    they wait for a collective. A store of our own would need a port of its own."""
    return torch.distributed.distributed_c10d._get_default_store()


# ------------------------------------------------------------------------------------- fully_shard


def sharded_modules(model: torch.nn.Module) -> list[Any]:
    """The modules of a model that have been given to ``torch.distributed.fsdp.fully_shard``, each
    ahead of those within it. They have ``unshard()`` and ``reshard()``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody can have called it before its import
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def plain_class(kind: type) -> type:
    """The class that a module had before it was given to ``fully_shard``, which makes a subclass of
    ``FSDPModule`` and of that class. Other classes are returned as they are."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not issubclass(kind, fsdp.FSDPModule):
        return kind
    return kind.__mro__[2]


SHARDED_STATE = "__composable_api_state_key"
"""The beginning of the names of those attributes of a module in which ``fully_shard`` keeps what it
knows of it: process groups and buffers, which a copy of the module must not have."""


def _shard_groups(module: Any) -> list[Any]:
    """The groups of parameters of a module that ``fully_shard`` gathers and reduces in one
    collective each; a module has one, in releases of PyTorch after 2.11 sometimes several."""
    state = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    if many is None:
        many = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(many)


def shard_policies(module: Any) -> list[tuple[Any, Any]]:
    """The policies for mixed precision and for offloading of a module's parameters in shards."""
    return [(group.mp_policy, group.offload_policy) for group in _shard_groups(module)]


def is_told_to_reshard(module: Any) -> bool:
    """Whether ``fully_shard`` was given ``reshard_after_forward=True`` for a module, and does not
    free its parameters only because that is the default."""
    state = module._get_fsdp_state()
    is_default = getattr(state, "_auto_reshard_after_forward", True)
    groups = _shard_groups(module)
    return not is_default and any(group.post_forward_mesh_info is not None for group in groups)


def take_over_shards(module: Any) -> None:
    """Let the module's own forward no longer gather its parameters, nor its backward reduce their
    gradients: the caller does it from now on. Gradients become sums over the ranks, not means.

    Modules have to be given in the order of :func:`sharded_modules`.
    """
    state = module._get_fsdp_state()
    state._lazy_init()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    for group in _shard_groups(module):
        group.reshard_after_backward = False


def reduce_shards(module: Any) -> None:
    """Add the gradients of a module's gathered parameters, summed over the ranks, to those of its
    shards. ``fully_shard`` does this in its hooks, and the runtime of torch.distributed.pipelining
    as it is done here."""
    for group in _shard_groups(module):
        group.post_backward()
        group.finalize_backward()


def number_of_groups() -> int:
    """How many process groups this process is in.

    PyTorch makes the name of a group that only its own ranks make from this number, which therefore
    has to be the same on all of them.
    """
    return len(torch.distributed.distributed_c10d._world.pg_names)


# ------------------------------------------------------------------------------------------ Dynamo


def dynamo() -> ModuleType:
    """``torch._dynamo``, imported only at the first call: its import takes seconds."""
    return importlib.import_module("torch._dynamo")


def may_vary(tensor: Tensor) -> Collection[int]:
    """The dimensions that ``torch._dynamo.maybe_mark_dynamic`` has marked on a tensor."""
    marked: Collection[int] = getattr(tensor, "_dynamo_weak_dynamic_indices", ())
    return marked


# ------------------------------------------------------------------------ compilers behind Dynamo


def dispatch_modes() -> list[TorchDispatchMode]:
    """The torch dispatch modes that are active in this thread, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


def graph_compiler(
    backend: str | Callable[..., Any],
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """The compiler of graphs that ``torch.compile`` makes from arguments of the same names.

    It takes a graph and example inputs, as a custom backend of ``torch.compile`` does. Raises what
    ``torch.compile`` raises for arguments that it does not know.
    """
    if backend == "inductor":
        made: Any = torch._TorchCompileInductorWrapper(mode, options, dynamic)  # type: ignore[no-untyped-call]
    else:
        made = torch._TorchCompileWrapper(backend, mode, options, dynamic)  # type: ignore[no-untyped-call]
    return made  # type: ignore[no-any-return]


COMPILED_NODE = "CompiledFunctionBackward"
"""The name of the autograd nodes that stand for a compiled backward."""


def compiled_ahead(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    backward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph by AOTAutograd, which traces its forward and backward graphs and has each
    compiled by one of the two functions given."""
    aot = importlib.import_module("functorch.compile")  # which is public, and imports Dynamo
    function: Callable[..., Any] = aot.aot_module_simplified(
        gm,
        inputs,
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        partition_fn=aot.min_cut_rematerialization_partition,
    )
    return function


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """The function in the calling convention of AOTAutograd: arguments come in a list, which the
    callee empties, so that the caller does not keep them alive."""

    def call(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return function(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _Sizes(ShapeEnv):
    """A ShapeEnv that gives the strides of a compiled forward's results as expressions of symbols.

    AOTAutograd compiles the backward for saved tensors of the strides that the compiled forward
    gives them, and inductor tells it these strides as numbers, of the sizes at hand. Comparing such
    a number with the symbols of other strides would make constants of symbols.
    """

    def evaluate_symexpr(self, code: str) -> Any:
        return self.deserialize_symexpr(code)


class SymbolicInputs:
    """Makes fake tensors of a graph's inputs, with symbols for sizes, in a new fake tensor mode.

    A compiler that is given these compiles code for all sizes that its guards admit.
    """

    def __init__(self) -> None:
        self.sizes = _Sizes()  # sizes that are equal have one symbol, and a guard says so
        self.mode = FakeTensorMode(shape_env=self.sizes, allow_non_fake_inputs=True)
        self.fakes: list[Any] = []  # of inputs whose sizes may differ in another call

    def _source(self) -> Any:
        source = importlib.import_module("torch._dynamo.source")
        return source.ConstantSource(f"input_{len(self.fakes)}")

    def constant(self, tensor: Tensor) -> Any:
        """The fake tensor for a tensor whose sizes are the same in all calls."""
        return self.mode.from_tensor(tensor, static_shapes=True)

    def tensor(self, tensor: Tensor, varying: Collection[int], alone: Collection[int] = ()) -> Any:
        """The fake tensor for a tensor, with symbols for the sizes of dimensions ``varying``.

        Sizes that are equal have the same symbol, but for those of dimensions ``alone``: if the
        number of rows had a symbol in each tensor, few shapes in the graph could be told equal.
        """

        def kind(dim: int) -> DimDynamic:
            if dim not in varying:
                return DimDynamic.STATIC
            return DimDynamic.DYNAMIC if dim in alone else DimDynamic.DUCK

        kinds = [kind(dim) for dim in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = self.mode.from_tensor(tensor, source=self._source(), symbolic_context=context)
        self.fakes.append(fake)
        return fake

    def number(self, value: int, alone: bool = False) -> Any:
        """A symbol for a whole number; that of sizes equal to it, unless ``alone``."""
        source = self._source()
        kind = DimDynamic.DYNAMIC if alone else DimDynamic.DUCK
        symbol = self.sizes.create_symbol(value, source, kind)
        self.fakes.append(self.sizes.create_symintnode(symbol, hint=value, source=source))
        return self.fakes[-1]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for compiling, which tells the compiler the fake tensor mode.

        In it, compiled backwards do not reuse the memory of saved tensors, since a backward may run
        several times; and they are compiled at once, so that a refusal is known before any run.
        """
        aot: Any = importlib.import_module("torch._functorch.config")
        told = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
        known = {name: value for name, value in told.items() if hasattr(aot, name)}
        context: Any = TracingContext(self.mode)
        with tracing(context), aot.patch(known):
            yield
        if getattr(context.fw_metadata, "bw_donated_idxs", ()) is None:
            context.fw_metadata.bw_donated_idxs = []  # at run time None would count as some

    def admit(self, values: list[Any]) -> bool:
        """Whether the guards of the compiled code hold for these values, given in the order of
        ``fakes``: one for each number, and for each tensor that is no constant."""
        return self.sizes.evaluate_guards_for_args(self.fakes, values, ignore_static=False)
