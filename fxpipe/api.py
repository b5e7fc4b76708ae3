"""The front door: :func:`compile`, and the :class:`Pipeline` that it gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import graphviz  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import passes as default
from fxpipe import ops
from fxpipe.batch import input_dims, output_dims
from fxpipe.graph import (
    COST,
    MICROBATCH,
    STAGE,
    Cost,
    attribute,
    format_code,
    stage_nodes,
)
from fxpipe.inspect.draw import draw_model, draw_pipeline, draw_stages
from fxpipe.inspect.report import report
from fxpipe.runtime.ambient import is_intercepted
from fxpipe.runtime.lanes import Lanes, run_inline
from fxpipe.runtime.program import Program, lower
from fxpipe.trace import CustomTracer, Traced, canonical, input_key, trace, untouched
from passes.checkpoint import MODES
from passes.microbatch import Dims
from passes.partition import PartitionError, Spec
from passes.skips import SkipLayout, skip_layout

PassList = Callable[..., Sequence[default.Pass]]


@dataclass(frozen=True)
class Stage:
    """A part of the model, and where it runs. ``cost`` is an estimate for one mini-batch."""

    index: int
    module: fx.GraphModule
    device: torch.device
    cost: Cost


def compile(
    model: nn.Module,
    devices: Sequence[str | torch.device] | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | None = None,
    partition: Spec = "auto",
    checkpoint: str = "never",
    in_dims: Any = None,
    out_dims: Any = None,
    tracer: str | CustomTracer = "auto",
    passes: PassList | None = None,
) -> Pipeline:
    """The same model, as a pipeline over several devices.

    Args:
        devices: one for each stage; repeats are allowed, and ``["cpu", "cpu"]`` is two lanes on the
            CPU. None: every visible accelerator, or two CPU lanes where there is none.
        example_inputs: arguments of one mini-batch; if these or ``example_kwargs`` are given, the
            pipeline is compiled now, otherwise at its first call.
        chunks: micro-batches per mini-batch. None: four for each stage, as far as the batch goes.
        partition: "auto"; or the names of the modules or nodes that begin a stage; or a dict from
            names to stages; or a function that takes the model graph and gives one of these.
        checkpoint: "never", "always", or "except_last": which micro-batches keep no activations and
            compute them again in the backward.
        in_dims, out_dims: the batch dimension of inputs and outputs, where it cannot be inferred:
            an int or None for all, or nested like the arguments, or the output. An output without
            one (None) is averaged, weighted by the sizes of the micro-batches.
        tracer: "auto", "symbolic", "export", or ``(model, args, kwargs) -> fx.GraphModule``.
        passes: in place of :func:`passes.default_passes`, with the same keyword arguments.

    Returns:
        A module with the model's signature, outputs, parameters and state dict. The parameters are
        the model's own, moved to the devices of their stages.

    Raises:
        ValueError: for arguments that make no sense, saying which would.
        TraceError, BatchError, PartitionError: at compilation, if the model cannot be traced, the
            batch not be found, or the model not be cut.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes an nn.Module, got a {type(model).__name__}")
    options = _Options(
        devices=_devices(devices),
        chunks=_checked_chunks(chunks),
        partition=partition,
        checkpoint=_checked_mode(checkpoint),
        in_dims=in_dims,
        out_dims=out_dims,
        tracer=tracer,
        passes=passes or default.default_passes,
    )
    pipeline = Pipeline(model, options)
    if example_inputs is not None or example_kwargs is not None:
        if example_inputs is not None and not isinstance(example_inputs, tuple):
            raise TypeError(
                f"example_inputs is the tuple of the model's arguments, got a "
                f"{type(example_inputs).__name__}; write example_inputs=(x,) for one"
            )
        pipeline.prepare(*(example_inputs or ()), **(example_kwargs or {}))
    return pipeline


def _devices(devices: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    if devices is None:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        kind = torch.accelerator.current_accelerator()
        if count and kind is not None:
            return tuple(torch.device(kind.type, i) for i in range(count))
        return (torch.device("cpu"),) * 2
    if isinstance(devices, str | torch.device):
        raise ValueError(
            f"devices is one device, {str(devices)!r}: give a list with one for each stage"
        )
    if not devices:
        raise ValueError("devices is empty: give one device for each stage, at least one")
    found = []
    for device in map(torch.device, devices):
        if device.type not in ("cpu", "meta") and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        found.append(device)
    return tuple(found)


def _checked_chunks(chunks: int | None) -> int | None:
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"chunks is {chunks!r}: give the number of micro-batches, 1 or more")
    return chunks


def _checked_mode(checkpoint: str) -> str:
    if checkpoint not in MODES:
        raise ValueError(f'checkpoint is {checkpoint!r}: give "never", "except_last" or "always"')
    return checkpoint


@dataclass(frozen=True)
class _Options:
    devices: tuple[torch.device, ...]
    chunks: int | None
    partition: Spec
    checkpoint: str
    in_dims: Any
    out_dims: Any
    tracer: str | CustomTracer
    passes: PassList

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.devices))

    def chunks_for(self, batch: int | None) -> int:
        """Micro-batches for a batch of that size: none is empty."""
        wanted = self.chunks
        if wanted is None:
            wanted = 4 * len(self.devices) if len(self.devices) > 1 else 1
        return max(1, min(wanted, 1 if batch is None else batch))


@dataclass
class _Unrolled:
    """A pipeline graph for one number of micro-batches, ready to run."""

    graph_module: fx.GraphModule
    inline: Program
    lanes: Program | None


@dataclass
class _Mode:
    """The model as traced for one kind of call: one structure of inputs, train or eval, ..."""

    traced: Traced
    stage_graph: fx.GraphModule
    in_dims: list[int | None]
    out_dims: list[Dims]
    example: _Example | None = None
    bindings: list[_Binding] = field(default_factory=list)
    unrolled: dict[int, _Unrolled] = field(default_factory=dict)

    @property
    def model_graph(self) -> fx.GraphModule:
        return self.traced.graph_module

    def batch_of(self, values: Sequence[Any]) -> int | None:
        for value, dim in zip(values, self.in_dims, strict=True):
            if dim is not None:
                size: int = value.shape[dim]
                return size
        return None


MANY = 100  # kinds of calls to remember a shortcut for


def _shortcut(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides, the model being as it was, which program a call runs; None if that takes more.

    For the usual call, tensors by position, so that a small model is not held up by ours.
    """
    if kwargs or not all(type(arg) is Tensor for arg in args):
        return None
    autocast = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in {arg.device.type for arg in args}
    )
    return autocast, *((arg.shape, arg.dtype) for arg in args)


class _Structure:
    """The modules of a model and their training flags, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(module, module.training) for module in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _ in self.modules
            if module._modules
        ]

    def holds(self) -> bool:
        """Whether they still are."""
        return all(module.training is training for module, training in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )


class Pipeline(nn.Module):
    """A model that runs as a pipeline. Made by :func:`compile`.

    Called like the model, it gives the model's outputs, differentiably. It shares the model's
    parameters, buffers and submodules, so that its state dict, optimizers, ``train()`` and
    ``eval()`` are the model's; ``module`` is the model itself.
    """

    module: nn.Module
    _options: _Options
    _modes: dict[Any, _Mode]
    _labels: dict[str, int]
    _shortcuts: dict[Any, tuple[_Mode, _Unrolled]]
    _structure: _Structure
    _shown: tuple[_Mode, _Unrolled] | None
    _example: _Example | None
    _closed: bool
    _lock: Any  # an RLock, which is a function to mypy
    _lanes: Lanes

    def __init__(self, model: nn.Module, options: _Options) -> None:
        super().__init__()
        self._set_up(model, options)

    def _set_up(self, model: nn.Module, options: _Options) -> None:
        # The very same dicts: what is registered at one is registered at both.
        self.__dict__.update(
            {
                "module": model,
                "_parameters": model._parameters,
                "_buffers": model._buffers,
                "_modules": model._modules,
                "_options": options,
                "_modes": {},
                "_labels": {},
                "_shortcuts": {},
                "_structure": _Structure(model),
                "_shown": None,
                "_example": None,
                "_closed": False,
                "_lock": threading.RLock(),
                "_lanes": Lanes(options.devices),
            }
        )

    # ------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these arguments, computed micro-batch by micro-batch."""
        mode, values, unrolled = self._ready(args, kwargs)
        in_a_lane = self._lanes.is_one(threading.current_thread())  # a hook may call us again
        if unrolled.lanes is None or in_a_lane or is_intercepted():
            output = run_inline(unrolled.inline, values)
        else:
            output = self._lanes.run(unrolled.lanes, values)
        return mode.traced.rebuild(output)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls like this one, without running it."""
        self._ready(args, kwargs)

    def close(self) -> None:
        """End the lanes' threads. The pipeline cannot be called any more; the model can."""
        self.__dict__["_closed"] = True
        self._lanes.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Mode, list[Any], _Unrolled]:
        if self._closed:
            raise RuntimeError(
                "this pipeline is closed: compile the model again, or call the model itself"
            )
        with self._lock:
            shortcut = _shortcut(args, kwargs)
            if shortcut is not None and shortcut in self._shortcuts and self._structure.holds():
                mode, unrolled = self._shortcuts[shortcut]
                values = list(args)
            else:
                mode = self._mode(args, kwargs)
                values = mode.traced.bind(args, kwargs)
                chunks = self._options.chunks_for(mode.batch_of(values))
                if chunks not in mode.unrolled:
                    mode.unrolled[chunks] = self._unroll(mode, chunks)
                unrolled = mode.unrolled[chunks]
                if not self._structure.holds() or len(self._shortcuts) > MANY:
                    self._shortcuts.clear()
                    self.__dict__["_structure"] = _Structure(self.module)
                if shortcut is not None:
                    self._shortcuts[shortcut] = mode, unrolled
            for binding in mode.bindings:
                binding.refresh()
            self.__dict__["_shown"] = (mode, unrolled)
        return mode, values, unrolled

    # ----------------------------------------------------------------------------------- compiling

    def _mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Mode:
        """What has been compiled for calls like this one; compiled now, if it has not been."""
        dims = input_dims(self.module, args, kwargs, self._options.in_dims)
        for with_shapes in (False, True):
            key = input_key(self.module, args, kwargs, batch_dims=dims, shapes=with_shapes)
            if (key, tuple(dims)) in self._modes:
                mode: _Mode = self._modes[key, tuple(dims)]
                return mode
        mode = self._compile(args, kwargs, dims)
        is_for_all_shapes = mode.traced.front_end == "symbolic"
        key = input_key(self.module, args, kwargs, batch_dims=dims, shapes=not is_for_all_shapes)
        self._modes[key, tuple(dims)] = mode
        return mode

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> _Mode:
        options = self._options
        args, kwargs = canonical(self.module, args, kwargs)
        with torch.inference_mode(False):  # what is inferred here is used in training too
            args, kwargs = _usual((args, kwargs))
            return self._compiled(options, args, kwargs, dims)

    def _compiled(
        self,
        options: _Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[int | None],
    ) -> _Mode:
        traced = trace(self.module, args, kwargs, tracer=options.tracer, batch_dims=dims)
        gm = traced.graph_module
        values = traced.bind(args, kwargs)
        with untouched(self.module):
            gm = default.Alias(tuple(values))(gm)
            found = output_dims(gm, values, dims, options.out_dims, traced.rebuild)
            gm = default.AnalyticCost()(gm)
            gm = default.Shared(tuple(values))(gm)
            gm = default.Random()(gm)
        self._label(gm)
        stage_graph = default.Split()(gm)
        self._place(stage_graph)
        mode = _Mode(
            traced=traced,
            stage_graph=stage_graph,
            in_dims=dims,
            out_dims=found,
        )
        mode.example = _Example.of(args, kwargs, dims, mode.batch_of(values))
        for gm in (mode.model_graph, stage_graph, *_stages(stage_graph)):
            mode.bindings += _bindings(gm, self.module)
        return mode

    def _label(self, gm: fx.GraphModule) -> None:
        """Cut as asked for; once it has been cut, what is traced later is cut alike."""
        work = list(stage_nodes(gm.graph))
        if all(node.name in self._labels for node in work):
            for node in work:
                node.meta[STAGE] = self._labels[node.name]
        else:
            default.Partition(len(self._options.devices), self._options.partition)(gm)
            self._labels.update({node.name: node.meta[STAGE] for node in work})

    def _place(self, stage_graph: fx.GraphModule) -> None:
        """Move every stage's parameters and buffers to its device, in place."""
        homes = _homes(_stages(stage_graph), self._options.devices)
        for module in self.module.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in homes:
                    device = homes[id(parameter)]
                    parameter.data = parameter.data.to(device)
                    if parameter.grad is not None:
                        parameter.grad.data = parameter.grad.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in homes:
                    module._buffers[name] = buffer.to(homes[id(buffer)])
        for stage, device in zip(_stages(stage_graph), self._options.devices, strict=True):
            for binding in _bindings(stage, self.module):
                binding.refresh()
            for module in stage.modules():  # constants of the trace, which the model has not
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)

    def _unroll(self, mode: _Mode, chunks: int) -> _Unrolled:
        options = self._options
        gm = mode.stage_graph
        for rewrite in options.passes(
            devices=options.names,
            chunks=chunks,
            in_dims=mode.in_dims,
            out_dims=mode.out_dims,
            checkpoint=options.checkpoint,
        ):
            gm = rewrite(gm)
        mode.bindings += _bindings(gm, self.module)
        # One micro-batch has nothing to run beside it.
        runs_inline = chunks == 1 or len(options.devices) == 1
        return _Unrolled(
            gm, lower(gm, inline=True), None if runs_inline else lower(gm, inline=False)
        )

    # ------------------------------------------------------------------------------------- looking

    def _last(self) -> tuple[_Mode, _Unrolled]:
        if self._shown is None and self._example is not None:
            args, kwargs = self._example.repeated()
            self.prepare(*args, **kwargs)
        if self._shown is None:
            raise RuntimeError(
                "this pipeline is not compiled yet: call it, or give example_inputs to compile()"
            )
        mode, unrolled = self._shown
        return mode, unrolled

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pipeline graph of the last call (or of the example inputs)."""
        return self._last()[1].graph_module

    @property
    def stage_graph(self) -> fx.GraphModule:
        """The model, one ``call_module`` a stage."""
        return self._last()[0].stage_graph

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model, its nodes labelled with their stages."""
        return self._last()[0].model_graph

    @property
    def graph(self) -> fx.Graph:
        """That of :attr:`graph_module`."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The pipeline graph as Python, each line with its stage, micro-batch and stream."""
        return format_code(self.graph_module)

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        mode, _ = self._last()
        costs = [Cost() for _ in self._options.devices]
        for node in stage_nodes(mode.model_graph.graph):
            costs[node.meta[STAGE]] += node.meta.get(COST, Cost())
        return [
            Stage(i, module, device, cost)
            for i, (module, device, cost) in enumerate(
                zip(_stages(mode.stage_graph), self._options.devices, costs, strict=True)
            )
        ]

    @property
    def skip_layout(self) -> SkipLayout:
        """Who sends which value to whom."""
        return skip_layout(self.stage_graph)

    @property
    def chunks(self) -> int:
        """The number of micro-batches of the last call."""
        return 1 + max(int(node.meta.get(MICROBATCH, 0)) for node in self.graph.nodes)

    def draw(self, level: str = "pipeline") -> graphviz.Source:
        """A drawing of the "pipeline", "stage" or "model" graph; ``str`` of it is DOT.

        It shows itself in notebooks; :func:`fxpipe.inspect.draw.render_svg` gives SVG.
        """
        names = self._options.names
        if level == "model":
            return draw_model(self.model_graph)
        if level == "stage":
            return draw_stages(self.stage_graph, names, [stage.cost for stage in self.stages])
        if level == "pipeline":
            return draw_pipeline(self.graph_module, names)
        raise ValueError(f'level is {level!r}: give "model", "stage" or "pipeline"')

    def report(self) -> str:
        """Per stage: time, memory, bytes; the skips, the bubble, and what limits the speed."""
        return report(
            self.model_graph,
            self._options.names,
            [stage.cost for stage in self.stages],
            self.skip_layout,
            self.chunks,
            was_chosen=self._options.chunks is None,
        )

    # ------------------------------------------------------------------------- like any nn.Module

    @property
    def training(self) -> bool:
        """The model's."""
        return self.module.training if "module" in self.__dict__ else True

    @training.setter
    def training(self, value: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        """``to(dtype)``, ``half()`` and the like, on the model. Stages stay on their devices."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            device = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            if device != tensor.device:
                raise RuntimeError(
                    f"a pipeline cannot be moved to {device}: its stages are on "
                    f"{', '.join(self._options.names)}; compile the model for other devices"
                )
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.recompile()
        return self

    def recompile(self) -> None:
        """Compile again at the next call, cut alike.

        What a trace cannot see has to be told so: that plain attributes which the forward reads
        have changed, say, or that hooks have been added to modules made of others.
        """
        with self._lock:
            if self._shown is not None:
                self.__dict__["_example"] = self._shown[0].example
            self.__dict__["_shown"] = None
            self._modes.clear()
            self._shortcuts.clear()

    def __getstate__(self) -> dict[str, Any]:
        """The model, and what is needed to compile it again: graphs and threads are made anew."""
        return {
            "module": self.module,
            "options": self._options,
            "labels": self._labels,
            "example": self._shown[0].example if self._shown else self._example,
            "closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._set_up(state["module"], state["options"])
        self.__dict__.update(
            _labels=state["labels"], _example=state["example"], _closed=state["closed"]
        )

    def extra_repr(self) -> str:
        """What the pipeline is made of, ahead of the model's modules."""
        return f"devices=[{', '.join(self._options.names)}]"


@dataclass
class _Example:
    """The inputs that a mode has been compiled for, two rows of them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: list[int | None]  # of the tensors
    batch: int | None

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None], batch: int | None
    ) -> _Example:
        def first_two(tensor: Tensor, dim: int) -> Tensor:
            return tensor.narrow(dim, 0, min(2, tensor.shape[dim])).clone()

        return _Example(_along((args, kwargs), dims, first_two), dims, batch)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the shapes they were: the two rows over and over."""

        def repeat(tensor: Tensor, dim: int) -> Tensor:
            rows = torch.arange(self.batch or 0, device=tensor.device) % tensor.shape[dim]
            return tensor.index_select(dim, rows)

        args, kwargs = _along(self.inputs, self.dims, repeat)
        return args, kwargs


def _along(inputs: Any, dims: Sequence[int | None], change: Callable[[Tensor, int], Tensor]) -> Any:
    """The inputs, with each tensor that has a batch dimension changed."""
    remaining = iter(dims)

    def each(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return tensor if dim is None else change(tensor.detach(), dim)

    return pytree.tree_map_only(Tensor, each, inputs)


def _stages(stage_graph: fx.GraphModule) -> list[fx.GraphModule]:
    calls = stage_graph.graph.find_nodes(op="call_module")
    return [attribute(stage_graph, str(call.target)) for call in calls]


def _homes(
    stages: Sequence[fx.GraphModule], devices: Sequence[torch.device]
) -> dict[int, torch.device]:
    """The device of each parameter and buffer, by its id."""
    homes: dict[int, torch.device] = {}
    where: dict[int, int] = {}
    for i, stage in enumerate(stages):  # a shared parameter lives where its value comes from
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            parameter = attribute(stage, share.args[0].target)
            homes[id(parameter)] = devices[i]
    shared = set(homes)
    for i, stage in enumerate(stages):
        for path, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            home = homes.setdefault(id(tensor), devices[i])
            other = where.setdefault(id(tensor), i)
            if home != devices[i] and id(tensor) not in shared:
                raise PartitionError(
                    f"the buffer {path} is used by stage {other} on {home} and by stage {i} on "
                    f"{devices[i]}: put all its users into one stage, with partition="
                )
    return homes


@dataclass
class _Binding:
    """A tensor that a graph module holds by name, and where the model has it."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]

    def refresh(self) -> None:
        """It may be another object by now: assigned, loaded, or exchanged by functional_call."""
        if self.name in self.theirs and self.ours[self.name] is not self.theirs[self.name]:
            self.ours[self.name] = self.theirs[self.name]


def _bindings(gm: fx.GraphModule, model: nn.Module) -> list[_Binding]:
    found = []
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        try:
            source, owner = model.get_submodule(path), gm.get_submodule(path)
        except AttributeError:  # a constant of the trace
            continue
        for theirs, ours in (
            (source._parameters, owner._parameters),
            (source._buffers, owner._buffers),
        ):
            if name in theirs and name in ours:
                found.append(_Binding(name, ours, theirs))
    return found


def _usual(inputs: Any) -> Any:
    """The inputs, copied out of inference mode if they have been made in it."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, inputs)
