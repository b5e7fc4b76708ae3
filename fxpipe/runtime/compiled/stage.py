"""Stages whose forward and backward are compiled, each stage by itself.

::

    stage (a graph of modules and functions)            what runs

    x ── linear ── relu ── linear ── y        ==>       x ── compiled code ── y
                                              grad x ◁── compiled code ◁── grad y

A stage is compiled at its first call with inputs of one kind (of dtypes and devices, say). Sizes
that grow with the batch are symbols, so that a smaller micro-batch causes no recompilation. A stage
that cannot be compiled runs uncompiled, with a warning. The backends are those of
``torch.compile``; Dynamo is not needed, since a stage is a graph already, and none of Dynamo's
guards run when a stage is called.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import (
    DeviceContext,
    SymbolicInputs,
    disable_current_modes,
    dispatch_modes,
    function_modes,
    graph_compiler,
    is_forward_mode,
    is_intercepting,
    pytree,
    transforms,
)
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import GROWS, SEED
from fxpipe.ir.hooks import all_are_watched
from fxpipe.ir.log import warn
from fxpipe.runtime.ambient import without_saved_tensors_hooks
from fxpipe.runtime.compiled.halves import compiled_in_halves, defer_to_tape
from fxpipe.runtime.compiled.lifted import Lifted, NotLifted, Tensors, obstacle, varies
from fxpipe.runtime.random import alone
from fxpipe.runtime.state import State
from fxpipe.runtime.writes import Writes

OFTEN = 8  # the most times that a stage is compiled for inputs that differ in sizes only
MANY = 256  # the most kinds of calls that are remembered

Given = str | Callable[..., Any] | Mapping[str, Any]
"""A backend as ``torch.compile`` takes it, or its arguments by name."""

_OPTIONS = {"backend", "mode", "options", "dynamic"}


class StageBackend:
    """A compiler of graphs: a backend of ``torch.compile``.

    Args:
        given: what the user has given: the name of a backend, a function that takes a graph module
            and example inputs, or a dict of arguments of ``torch.compile``: "backend", "mode",
            "options" and "dynamic".

    Raises:
        ValueError: for a name, or arguments, that ``torch.compile`` does not know.
        TypeError: for what is neither name, function nor dict.
    """

    def __init__(self, given: Given) -> None:
        self.given = given
        if not isinstance(given, str | Mapping) and not callable(given):
            raise TypeError(
                f"stage_backend is a {type(given).__name__}: give the name of a backend of "
                'torch.compile, such as "inductor", a function of a graph module and example '
                'inputs, or a dict such as {"backend": "inductor", "mode": "max-autotune"}'
            )
        told: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"backend": given}
        unknown = told.keys() - _OPTIONS
        if unknown:
            raise ValueError(
                f"stage_backend has the key {sorted(unknown)[0]!r}: give only {sorted(_OPTIONS)}, "
                "which torch.compile takes"
            )
        backend = told.get("backend", "inductor")
        self.dynamic: bool | None = told.get("dynamic")
        mode, options = told.get("mode"), told.get("options")
        if mode is not None and options is not None:
            raise ValueError("stage_backend has both mode and options: give one of them")
        try:
            self._compile = graph_compiler(backend, mode, options, self.dynamic)
        except Exception as error:
            if not is_the_models(error):
                raise
            names = ", ".join(map(repr, torch.compiler.list_backends()))
            raise ValueError(
                f"stage_backend is {reprlib.repr(given)}, which torch.compile does not take: "
                f"{error}; it has the backends {names}"
            ) from error
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
        self.name = f"{name} ({mode})" if mode else str(name)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled function of a graph, which takes and gives flat tuples of tensors."""
        return self._compile(gm, list(inputs))

    def __reduce__(self) -> tuple[Any, ...]:
        return StageBackend, (self.given,)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Variant:
    """The compiled code of a stage for inputs of one kind."""

    lifted: Lifted
    inputs: SymbolicInputs
    shapes: tuple[Any, ...]
    function: Callable[..., Any]
    later: tuple[int, ...]  # the inputs whose gradients the backward's second half computes


class CompiledStage:
    """Runs the compiled code of a stage, or the stage itself where it cannot be compiled.

    Args:
        name: what the stage is called in warnings.
        in_halves: whether its backward can be run in two halves, in a step.

    The attribute ``module`` is a module that shares the parameters, buffers and submodules of the
    stage, also when these are replaced, and whose ``forward`` runs the compiled code.
    """

    def __init__(
        self, stage: fx.GraphModule, name: str, backend: StageBackend, in_halves: bool = False
    ) -> None:
        self.stage, self.name, self.backend, self.in_halves = stage, name, backend, in_halves
        self.tensors = Tensors(stage)
        self._modules = list(stage.named_modules())  # other modules would be another stage
        self.module = _like(stage, self)
        self.obstacle: str | None = None
        self.times = 0  # how often it has been compiled
        self.refusals: dict[str, None] = {}  # the reasons given in warnings, in order
        self._state: State | None = None
        self._looks: Any = None
        placeholders = stage.graph.find_nodes(op="placeholder")
        self._seeds = {i for i, node in enumerate(placeholders) if SEED in node.meta}
        self._grows: list[Any] = [node.meta.get(GROWS) for node in placeholders]
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self._known: dict[Any, _Variant | None] = {}  # by looks of inputs; None: refused
        self._variants: dict[Any, list[_Variant]] = {}  # by kinds of inputs

    def refresh(self) -> None:
        """Ahead of a run, drop the compiled code if something that it depends on has changed since
        the last run: what parameters look like, or attributes and hooks of modules in the stage."""
        self.obstacle = obstacle(self._modules)
        accelerator = torch.accelerator.current_accelerator()
        self._kinds_of_devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        looks = self.tensors.looks()
        if self._state is None or looks != self._looks or self._state.changed():
            self._forget()
            modules = [m for _, m in self._modules if not isinstance(m, fx.GraphModule)]
            self._state, self._looks = State(modules), looks

    def __call__(self, *args: Any) -> Any:
        """Run the stage on these arguments: its compiled code, or the stage itself if it cannot be
        compiled, or if a hook, mode or transform has to see each of its operators."""
        leaves: list[Any] = []
        variant = None if self._is_observed() else self._variant(args, leaves)
        if variant is None:
            if self.obstacle is not None:
                self._warn(self.obstacle)
            return type(self.stage).forward(self.stage, *args)
        given = self.tensors.now() + leaves
        outputs = variant.function(*given)
        if variant.later and torch.is_grad_enabled():
            defer_to_tape(outputs, {i: given[i] for i in variant.later})
        return variant.lifted.results(outputs)

    def _is_observed(self) -> bool:
        """Whether a hook, a mode or a function transform has to see each operator, or each call of
        a module, so that these must run one by one."""
        return bool(
            self.obstacle is not None
            or all_are_watched()
            or (is_intercepting() and _operators_are_seen())
        )

    def _variant(self, args: tuple[Any, ...], leaves: list[Any]) -> _Variant | None:
        """The compiled code for a call with these arguments; it is compiled now if need be. None if
        that is impossible.

        ``leaves`` gets the inputs of that code, other than the stage's own tensors. This goes
        through the arguments once, since it is done in each call, and each Python function that a
        call runs has been driven from the CPU's caches by the kernels of the call before.
        """
        looks: list[Any] = [_ambient(self._kinds_of_devices)]
        for i, arg in enumerate(args):
            if type(arg) is Tensor and arg.layout is torch.strided:
                leaves.append(arg)
                looks.append((arg.dtype, arg.device, arg.requires_grad, arg.shape, arg.stride()))
            elif i in self._seeds:  # as a tensor: a compiler would take a number for a size
                if arg is None:
                    return None
                leaves.append(torch.tensor(arg, device="cpu"))
            else:
                leaves += filter(varies, pytree.tree_leaves(arg))
                looks += map(_looks, _flat(arg))
        key = tuple(looks)
        try:
            return self._known[key]
        except (KeyError, TypeError):
            pass
        with alone():  # the compiler changes the default generators for a while
            if len(self._known) > MANY:
                self._known.clear()
            try:
                if key not in self._known:
                    self._known[key] = self._find(args, leaves)
                return self._known[key]
            except TypeError as error:  # a value without a hash
                self._warn(str(error))
                return None

    def _find(self, args: tuple[Any, ...], leaves: list[Any]) -> _Variant | None:
        """The compiled code for arguments that look as none before. It is compiled now, unless the
        code for arguments of other sizes will do."""
        others = (arg for i, arg in enumerate(args) if i not in self._seeds)
        looks = (_looks(leaf) for arg in others for leaf in _flat(arg))
        kinds = _ambient(self._kinds_of_devices), *(kind for kind, _ in looks)
        alike = self._variants.setdefault(kinds, [])
        stand_ins = list(map(_stand_in, leaves))
        for variant in alike:
            if variant.inputs.admit(stand_ins):
                return variant
        if len(alike) == OFTEN:
            self._warn(f"it has been compiled for {OFTEN} sizes of its inputs already")
            return None
        try:
            alike.append(self._compiled(args, leaves, alike))
        except NotLifted as refusal:
            self._warn(str(refusal))
            return None
        except Exception as error:
            if not is_the_models(error):
                raise
            text = str(error).strip().splitlines()
            self._warn(f"{type(error).__name__}: {text[0] if text else ''}")
            return None
        return alike[-1]

    def _compiled(
        self, args: tuple[Any, ...], leaves: list[Any], alike: list[_Variant]
    ) -> _Variant:
        """Compile the stage for arguments like these.

        A size is a symbol if it is known to grow with the batch, or if it is another one than in
        an earlier call that the stage was compiled for.
        """
        is_recorded = torch.is_grad_enabled()
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(is_recorded),
            without_saved_tensors_hooks(),
            disable_current_modes(),
        ):
            inputs = SymbolicInputs()
            fakes = [inputs.constant(_example(tensor)) for tensor in self.tensors.now()]
            varying = self._varying(args, leaves, alike)
            alone = _alone(leaves, varying, alike)
            for leaf, dims, apart in zip(leaves, varying, alone, strict=True):
                if isinstance(leaf, Tensor):
                    fakes.append(inputs.tensor(_example(leaf, own=True), dims, apart))
                else:
                    fakes.append(inputs.number(leaf, bool(apart)))
            lifted = Lifted(self.stage, self.tensors, args, fakes, inputs.mode)
            self.times += 1
            later: tuple[int, ...] = ()
            if self.in_halves and is_recorded:
                given = [*self.tensors.now(), *leaves]
                later = tuple(i for i, each in enumerate(given) if _is_trained(each))
            with inputs.compiling():
                if later:
                    function = compiled_in_halves(
                        lifted.graph_module, inputs, fakes, later, self.backend
                    )
                else:
                    function = self.backend(lifted.graph_module, fakes)
        return _Variant(lifted, inputs, tuple(map(_size, leaves)), function, later)

    def _varying(
        self, args: tuple[Any, ...], leaves: list[Any], alike: list[_Variant]
    ) -> list[set[int]]:
        """For each of the leaves, the dimensions whose sizes are symbols."""
        symbolic: list[set[int]] = [set() for _ in leaves]
        if self.backend.dynamic is False:
            return symbolic
        remaining = iter(symbolic)
        for arg, grows in zip(args, self._grows, strict=True):
            within = [leaf for leaf in pytree.tree_leaves(arg) if varies(leaf)]
            tensors = [leaf for leaf in within if isinstance(leaf, Tensor)]
            known = iter(grows if grows and len(grows) == len(tensors) else [()] * len(tensors))
            for leaf in within:
                dims = next(remaining)
                if isinstance(leaf, Tensor):
                    dims.update(next(known))
        for i, leaf in enumerate(leaves):
            for variant in alike:
                size, other = _size(leaf), variant.shapes[i]
                if isinstance(size, tuple):
                    symbolic[i] |= {d for d, n in enumerate(size) if n != other[d]}
        if self.backend.dynamic:
            symbolic = [
                set(range(leaf.dim())) if isinstance(leaf, Tensor) else set() for leaf in leaves
            ]
        return symbolic

    def _warn(self, why: str) -> None:
        if why not in self.refusals:
            self.refusals[why] = None
            warn(
                f"{self.name} is not compiled by {self.backend.name}, and runs as it is: {why}",
            )


def _like(stage: fx.GraphModule, compiled: CompiledStage) -> fx.GraphModule:
    """A module that shares all attributes of a stage, but whose ``forward`` runs ``compiled``."""
    module: fx.GraphModule = object.__new__(type(stage))  # its __init__ would generate code again
    module.__dict__.update(stage.__dict__)

    def forward(self: nn.Module, *args: Any) -> Any:
        return compiled(*args)

    module.__dict__["forward"] = MethodType(forward, module)
    module.__dict__["compiled"] = compiled
    return module


def _operators_are_seen() -> bool:
    """Whether a mode or a function transform of this thread sees each operator."""
    return bool(
        transforms()
        or is_forward_mode()
        or any(type(mode) is not DeviceContext for mode in function_modes())
        or any(type(mode) is not Writes for mode in dispatch_modes())
    )


def _ambient(kinds_of_devices: Iterable[str]) -> tuple[Any, ...]:
    """The settings of the running thread that compiled code depends on: a change of one leads to a
    recompilation. Those of autocast are asked for these kinds of devices."""
    settings: list[Any] = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    ]
    for kind in kinds_of_devices:
        settings.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    if is_intercepting():
        settings += (mode.device for mode in function_modes() if isinstance(mode, DeviceContext))
    return tuple(settings)


def _flat(value: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(value)
    return leaves if spec.is_leaf() else (*leaves, spec)  # type: ignore[return-value]


def _looks(leaf: Any) -> tuple[Any, Any]:
    """Two keys of an input: its kind (dtype, device, layout and so on), for which code is compiled,
    and its sizes and strides, which may be symbols in that code."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided:
            return (
                type(leaf),
                leaf.dtype,
                leaf.device,
                leaf.layout,
                leaf.requires_grad,
            ), leaf.shape
        kind = type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, leaf.dim()
        return kind, (leaf.shape, leaf.stride())
    if varies(leaf):
        return int, leaf
    return (type(leaf), leaf), None


def _alone(
    leaves: Sequence[Any], varying: Sequence[set[int]], alike: Sequence[_Variant]
) -> list[set[int]]:
    """For each of the leaves, the dimensions whose sizes are only by chance what other sizes are:
    in an earlier call that the stage was compiled for they were not. For a number it is {0}."""
    histories: dict[int, tuple[Any, ...]] = {}  # by today's size: what it was in earlier calls
    found: list[set[int]] = []
    for i, (leaf, dims) in enumerate(zip(leaves, varying, strict=True)):
        sizes = [_sizes(leaf), *(_sizes(variant.shapes[i]) for variant in alike)]
        apart = set()
        for dim in sorted(dims) if isinstance(leaf, Tensor) else [0]:
            now, *before = (each[dim] for each in sizes)
            if histories.setdefault(now, tuple(before)) != tuple(before):
                apart.add(dim)
        found.append(apart)
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    size = _size(value)
    return size if isinstance(size, tuple) else (size,)


def _is_trained(value: Any) -> bool:
    """Whether the value is a trained parameter, whose gradient the second half computes."""
    return isinstance(value, nn.Parameter) and value.requires_grad


def _size(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _stand_in(leaf: Any) -> Any:
    """A tensor of the same shape, strides and dtype without memory, which is enough for guards."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _example(tensor: Tensor, *, own: bool = False) -> Tensor:
    """A tensor of the same shape, strides, dtype and device, without autograd history.

    ``own``: it is in new memory, with the storage offset 0.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    if (own or tensor.is_inference()) and tensor.layout == torch.strided:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    else:
        made = tensor.data
    return made.requires_grad_(tensor.requires_grad)


class CompiledStages:
    """The compiled stages of a model, one for each stage or segment.

    Args:
        backend: compiles them.
    """

    def __init__(self, backend: StageBackend) -> None:
        self.backend = backend
        self._made: dict[fx.GraphModule, CompiledStage] = {}
        self._in_halves: dict[fx.GraphModule, CompiledStage] = {}

    def of(self, stage: fx.GraphModule, name: str) -> fx.GraphModule:
        """The stage as a module whose ``forward`` runs the compiled code.

        ``name``: what the stage is called in warnings. A later call does not change it.
        """
        if as_it_is(stage) is not stage:
            return stage
        if stage not in self._made:
            self._made[stage] = CompiledStage(stage, name, self.backend)
        return self._made[stage].module

    def in_halves(self, stage: fx.GraphModule) -> fx.GraphModule:
        """The stage as a module as in :meth:`of`, whose backward can also run in two halves."""
        name = f"{type(stage).__name__} in halves"
        if stage not in self._in_halves:
            self._in_halves[stage] = CompiledStage(stage, name, self.backend, in_halves=True)
        return self._in_halves[stage].module

    def refresh(self) -> None:
        """Drop compiled code that is no longer right; see :meth:`CompiledStage.refresh`."""
        for compiled in self._all:
            compiled.refresh()

    @property
    def _all(self) -> list[CompiledStage]:
        return [*self._made.values(), *self._in_halves.values()]

    @property
    def times(self) -> int:
        """How many times a stage has been compiled."""
        return sum(compiled.times for compiled in self._all)

    @property
    def lines(self) -> list[str]:
        """Sentences for the report: which compiler the stages have, and which stages run
        uncompiled, each with the reason."""
        said = [f"stages are compiled by {self.backend}, each when it is first called"]
        for compiled in self._all:
            said += [f"{compiled.name} runs as it is: {why}" for why in compiled.refusals]
        return said


def as_it_is(stage: fx.GraphModule) -> fx.GraphModule:
    """The uncompiled stage of a module that :class:`CompiledStages` has made. Any other stage is
    returned unchanged."""
    compiled = vars(stage).get("compiled")
    return compiled.stage if isinstance(compiled, CompiledStage) else stage
