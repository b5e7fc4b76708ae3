"""From a call of the model to a program: trace, cut, place, unroll; and what is kept of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

import passes as default
from fxpipe import ops
from fxpipe.batch import input_dims, other_input_dims, output_dims
from fxpipe.graph import COST, FIRST, ONCE, STAGE, Cost, attribute, stage_nodes
from fxpipe.hooks import has_hooks
from fxpipe.loss import Loss, Target
from fxpipe.options import Options, RunPass
from fxpipe.runtime.ambient import transforms
from fxpipe.runtime.microbatch import Dims
from fxpipe.runtime.program import Program, lower
from fxpipe.structure import Structure, map_tensors
from fxpipe.trace import (
    Traced,
    autocast_of,
    canonical,
    input_key,
    trace,
    untouched,
)
from fxpipe.trace.care import on_one_device
from passes.costs import cost_pass
from passes.fakes import forget_history
from passes.partition import PartitionError
from passes.problem import reads_before_writes, together


def run_pass(rewrite: default.Pass, gm: fx.GraphModule) -> fx.GraphModule:
    """Run a pass that nobody looks at."""
    return rewrite(gm)


@dataclass
class Unrolled:
    """A pipeline graph for one number of micro-batches, ready to run."""

    graph_module: fx.GraphModule
    inline: Program
    lanes: Program | None


@dataclass
class Mode:
    """The model as traced for one kind of call: one structure of inputs, train or eval, ..."""

    traced: Traced
    stage_graph: fx.GraphModule
    in_dims: list[int | None]
    out_dims: list[Dims]
    example: Example | None = None
    bindings: list[_Binding] = field(default_factory=list)
    unrolled: dict[int, Unrolled] = field(default_factory=dict)
    steps: dict[Any, Unrolled] = field(default_factory=dict)

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model."""
        return self.traced.graph_module

    @property
    def costs(self) -> list[Cost]:
        """Of each stage, for the example's mini-batch."""
        nodes = list(stage_nodes(self.model_graph.graph))
        costs = [Cost() for _ in {node.meta[STAGE] for node in nodes}]
        for node in nodes:
            costs[node.meta[STAGE]] += node.meta.get(COST, Cost())
        return costs

    def batch_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The size of the mini-batch of a call."""
        return self.batch_of(self.traced.bind(args, kwargs))

    def refresh(self) -> None:
        """Take what the model has now, where its tensors have been exchanged."""
        for binding in self.bindings:
            binding.refresh()

    def batch_of(self, values: Sequence[Any]) -> int | None:
        """The size of the mini-batch."""
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
    return autocast_of(args), *((arg.shape, arg.dtype) for arg in args)


class _Structure:
    """The modules of a model, their training flags and whether they have hooks, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self) -> bool:
        """Whether they still are."""
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )


class Compiler:
    """Compiles a model for the calls that come, and remembers what it has compiled."""

    def __init__(
        self, model: nn.Module, options: Options, labels: dict[str, int] | None = None
    ) -> None:
        self.model = model
        self.options = options
        self.labels = dict(labels or {})  # of nodes: their stages
        self.homes: dict[str, int] = {}  # of parameters
        self._modes: dict[Any, Mode] = {}
        self._shortcuts: dict[Any, Mode] = {}
        self._structure = _Structure(model)
        self._lock = threading.RLock()

    def ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mode, list[Any], int]:
        """The mode for a call, compiled now if it has not been; the values to run it with; and the
        number of micro-batches."""
        with self._lock:
            mode, values = self._found(args, kwargs)
            mode.refresh()
            return mode, values, self.options.chunks_for(mode.batch_of(values))

    def pipeline(self, mode: Mode, chunks: int) -> Unrolled:
        """The pipeline graph of so many micro-batches."""
        with self._lock:
            if chunks not in mode.unrolled:
                mode.unrolled[chunks] = self._unroll(mode, chunks)
                mode.refresh()
            return mode.unrolled[chunks]

    def step(self, mode: Mode, chunks: int, target: Target) -> Unrolled:
        """The step graph of so many micro-batches, and for targets like this one."""
        key = chunks, target.spec, target.has_batch
        with self._lock:
            if key not in mode.steps:
                mode.steps[key] = self._unroll_step(mode, chunks, target)
                mode.refresh()
            return mode.steps[key]

    def _unroll_step(self, mode: Mode, chunks: int, target: Target) -> Unrolled:
        options = self.options
        rewrite = default.Step(
            loss=Loss(options.loss_fn, mode.traced.rebuild, target.spec),
            schedule=options.schedule_for(chunks, mode.costs),
            devices=options.names,
            in_dims=tuple(mode.in_dims),
            targets=target.has_batch,
            checkpoint=options.checkpoint,
            checkpoint_segments=options.checkpoint_segments,
        )
        observed = self._observed(f"step of {chunks}", mode.stage_graph)
        return self._unrolled(mode, observed(rewrite, mode.stage_graph), chunks)

    def _observed(self, title: str, gm: fx.GraphModule) -> RunPass:
        """How to run the passes that begin with this graph."""
        if self.options.observer is None:
            return run_pass
        return self.options.observer(f"{type(self.model).__name__} {title}", gm)

    def forget(self) -> None:
        """All that has been compiled, but for where the model is cut."""
        with self._lock:
            self._modes.clear()
            self._shortcuts.clear()

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mode, list[Any]]:
        """The mode for a call, and the values of its inputs."""
        shortcut = _shortcut(args, kwargs)
        if not self._structure.holds() or len(self._shortcuts) > MANY:
            self._shortcuts.clear()
            self._structure = _Structure(self.model)
        if shortcut is not None and shortcut in self._shortcuts:
            return self._shortcuts[shortcut], list(args)
        mode = self._mode(args, kwargs)
        if shortcut is not None:
            self._shortcuts[shortcut] = mode
        return mode, mode.traced.bind(args, kwargs)

    def _mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mode:
        """What has been compiled for calls like this one; compiled now, if it has not been."""
        dims = input_dims(self.model, args, kwargs, self.options.in_dims)
        for with_shapes in (False, True):
            key = input_key(self.model, args, kwargs, batch_dims=dims, shapes=with_shapes)
            mode = self._modes.get((key, tuple(dims)))
            if mode is not None and (mode.batch_in(args, kwargs) or 0) <= mode.traced.largest_batch:
                return mode
        if transforms():
            raise RuntimeError(
                "a pipeline cannot be compiled inside of a torch.func transform: call it once "
                "before, or give example_inputs to compile()"
            )
        try:
            mode = self._compile(args, kwargs, dims)
        except PartitionError:  # which has nothing to do with the batch
            raise
        except Exception:  # it may be that inputs have been taken for parts of the batch
            other = other_input_dims(self.model, args, kwargs, dims, self.options.in_dims)
            if other is None:
                raise
            dims = other
            mode = self._compile(args, kwargs, dims)
        is_for_all_shapes = mode.traced.front_end == "symbolic"
        key = input_key(self.model, args, kwargs, batch_dims=dims, shapes=not is_for_all_shapes)
        if len(self._modes) > MANY:
            self._modes.clear()
        self._modes[key, tuple(dims)] = mode
        return mode

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> Mode:
        options = self.options
        args, kwargs = canonical(self.model, args, kwargs)
        with (
            torch.inference_mode(False),  # what is inferred here is used in training too
            torch.autograd.set_detect_anomaly(False),  # fake gradients have no values to look at
        ):
            args, kwargs = _usual((args, kwargs))
            return self._compiled(options, args, kwargs, dims)

    def _compiled(
        self,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[int | None],
    ) -> Mode:
        tensors, _ = Structure.of((args, kwargs))
        with self._where_it_runs(tensors):
            traced = trace(self.model, args, kwargs, tracer=options.tracer, batch_dims=dims)
            gm = traced.graph_module
            values = traced.bind(args, kwargs)
            observed = self._observed("stages", gm)
            gm, found = self._prepared(gm, traced, values, dims, observed)
        self._label(gm, observed)
        for rewrite in (default.Free(), default.Tied(options.names)):
            gm = observed(rewrite, gm)
        stage_graph = observed(default.Split(), gm)
        if values:
            stage_graph = observed(default.Devices(values[0].device, options.devices), stage_graph)
        self._place(stage_graph)
        mode = Mode(
            traced=traced,
            stage_graph=stage_graph,
            in_dims=dims,
            out_dims=found,
        )
        mode.example = Example.of(args, kwargs, dims, mode.batch_of(values))
        for gm in (mode.model_graph, stage_graph, *stages_of(stage_graph)):
            mode.bindings += _bindings(gm, self.model)
        return mode

    def _where_it_runs(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A model whose stages have been placed comes back together to be traced once more."""
        if not self.labels or not inputs:
            return nullcontext()
        return on_one_device(self.model, inputs[0].device)

    def _prepared(
        self,
        gm: fx.GraphModule,
        traced: Traced,
        values: list[Any],
        dims: list[int | None],
        observed: RunPass,
    ) -> tuple[fx.GraphModule, list[Dims]]:
        """The model graph with all that a cut has to know, and the outputs' batch dimensions."""
        options = self.options
        if options.deferred_batch_norm:
            gm = observed(default.DeferredBatchNorm(), gm)
        with untouched(self.model):
            gm = observed(default.Alias(tuple(values)), gm)
            gm = observed(default.WrittenInputs(tuple(dims), options.chunks), gm)
            if any(ONCE in node.meta for node in gm.graph.nodes):
                gm = observed(default.Alias(tuple(values)), gm)
            found = output_dims(gm, values, dims, options.out_dims, traced.rebuild)
            costs = "analytic" if self.labels else options.costs  # it has been cut
            gm = observed(cost_pass(costs, tuple(values), device=options.devices[0]), gm)
            gm = observed(default.Shared(), gm)
            forget_history(gm.graph)
            gm = observed(default.Random(), gm)
        return gm, found

    def _label(self, gm: fx.GraphModule, observed: RunPass) -> None:
        """Cut as asked for; once it has been cut, what is traced later is cut alike."""
        work = list(stage_nodes(gm.graph))
        known = self._known(gm, work)
        if known is not None:
            for node, stage in known.items():
                node.meta[STAGE] = stage
        else:
            if self.labels:  # parameters will move: what has been compiled is of no use
                self.forget()
                self.labels.clear()
                self.homes.clear()
            observed(default.Partition(len(self.options.devices), self.options.partition), gm)
            self.labels.update({node.name: node.meta[STAGE] for node in work})
        for node in work:
            for path in _held(gm, node):
                self.homes.setdefault(path, node.meta[STAGE])

    def _known(self, gm: fx.GraphModule, work: Sequence[fx.Node]) -> dict[fx.Node, int] | None:
        """A cut by which everything stays where it is; None if there is none.

        Other arguments may lead the model another way. Nodes are known by their names, if that
        makes a cut; else by the parameters that they use, and the others go where they are needed.
        """
        if not self.labels:
            return None
        by_name = {node: self.labels.get(node.name, -1) for node in work}
        stays = all(
            self.homes.get(path, stage) == stage
            for node, stage in by_name.items()
            for path in _held(gm, node)
        )
        if stays and _is_cut(by_name, len(self.options.devices)):
            return by_name
        found: dict[fx.Node, int] = {}
        for node in work:
            needed = max((found[n] for n in node.all_input_nodes if n in found), default=0)
            homes = [self.homes[path] for path in _held(gm, node) if path in self.homes]
            found[node] = max([needed, *homes])
        for group in together(work):
            for node in group:
                found[node] = max(found[n] for n in group)
        return found if _is_cut(found, len(self.options.devices)) else None

    def _place(self, stage_graph: fx.GraphModule) -> None:
        """Move every stage's parameters and buffers to its device, in place."""
        homes = _homes(stages_of(stage_graph), self.options.devices)
        for source in stage_graph.graph.find_nodes(op="get_attr"):
            tensor = attribute(stage_graph, str(source.target))
            for user in source.users:  # what is done once, beside a stage
                if STAGE in user.meta and FIRST not in user.meta:
                    homes[id(tensor)] = self.options.devices[user.meta[STAGE]]
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in homes:
                    device = homes[id(parameter)]
                    parameter.data = parameter.data.to(device)
                    if parameter.grad is not None:
                        parameter.grad.data = parameter.grad.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in homes:
                    module._buffers[name] = buffer.to(homes[id(buffer)])
        for stage, device in zip(stages_of(stage_graph), self.options.devices, strict=True):
            for binding in _bindings(stage, self.model):
                binding.refresh()
            for module in stage.modules():  # constants of the trace, which the model has not
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)

    def _unroll(self, mode: Mode, chunks: int) -> Unrolled:
        options = self.options
        gm = mode.stage_graph
        observed = self._observed(f"pipeline of {chunks}", gm)
        for rewrite in options.passes(
            devices=options.names,
            chunks=chunks,
            in_dims=mode.in_dims,
            out_dims=mode.out_dims,
            checkpoint=options.checkpoint,
            checkpoint_segments=options.checkpoint_segments,
        ):
            gm = observed(rewrite, gm)
        return self._unrolled(mode, gm, chunks)

    def _unrolled(self, mode: Mode, gm: fx.GraphModule, chunks: int) -> Unrolled:
        """Make a graph ready to run."""
        stages = stages_of(mode.stage_graph)
        for made in gm.modules():  # the graph itself, and what passes have added to it
            if isinstance(made, fx.GraphModule) and made not in stages:
                mode.bindings += _bindings(made, self.model)
        # One micro-batch has nothing to run beside it.
        runs_inline = chunks == 1 or len(self.options.lanes) == 1
        in_lanes = None if runs_inline else lower(gm, placement=self.options.placement)
        return Unrolled(gm, lower(gm), in_lanes)


@dataclass
class Example:
    """The inputs that a mode has been compiled for, two rows of them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: list[int | None]  # of the tensors
    batch: int | None

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None], batch: int | None
    ) -> Example:
        def first_two(tensor: Tensor, dim: int) -> Tensor:
            return tensor.narrow(dim, 0, min(2, tensor.shape[dim])).clone()

        return Example(_along((args, kwargs), dims, first_two), dims, batch)

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

    return map_tensors(each, inputs)


def stages_of(stage_graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The modules of the stages, in order."""
    calls = stage_graph.graph.find_nodes(op="call_module")
    return [attribute(stage_graph, str(call.target)) for call in calls]


def _held(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """The paths of the parameters that a node uses."""
    if node.op == "call_module":
        for name, _ in gm.get_submodule(str(node.target)).named_parameters():
            yield f"{node.target}.{name}"
    for source in node.all_input_nodes:
        path = str(source.target)
        if source.op == "get_attr" and isinstance(attribute(gm, path), nn.Parameter):
            yield path


def _is_cut(labels: Mapping[fx.Node, int], stages: int) -> bool:
    """Whether no stage is empty, none needs a later one, or reads what an earlier one has changed,
    and what belongs together is in one."""
    return (
        set(labels.values()) == set(range(stages))
        and all(labels.get(n, 0) <= labels[node] for node in labels for n in node.all_input_nodes)
        and all(labels[reader] <= labels[writer] for reader, writer in reads_before_writes(labels))
        and all(len({labels[node] for node in group}) == 1 for group in together(list(labels)))
    )


def _homes(
    stages: Sequence[fx.GraphModule], devices: Sequence[torch.device]
) -> dict[int, torch.device]:
    """The device of each parameter and buffer, by its id."""
    homes: dict[int, torch.device] = {}
    where: dict[int, int] = {}
    for i, stage in enumerate(stages):  # a shared parameter lives where its value comes from
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            if share.args[0].op == "get_attr":
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
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
