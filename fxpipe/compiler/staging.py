"""From a call to its mode: the model is traced for the call, cut into stages, and the stages are
placed on their devices.

::

    model, call ── trace ── model graph ── alias, rows, cost ... ── partition, split ── stage graph
                     │                                                                       │
                     └ where that fails: for one batch size, or for lists of one length      place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

import passes
from fxpipe.compiler.bindings import bindings
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.deciding import AsChosen
from fxpipe.compiler.disk.entry import CacheEntry
from fxpipe.compiler.disk.slot import CacheSlot
from fxpipe.compiler.fitting import Fitting
from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.on_call import ANY_SHAPES, ANY_SIZE, ONE_SIZE
from fxpipe.compiler.guards.program import Guards
from fxpipe.compiler.history import History
from fxpipe.compiler.layout import CutAlike, Layout
from fxpipe.compiler.options import Options
from fxpipe.compiler.outputs import OutputDims, noted_dims
from fxpipe.compiler.placement import place, refuse_separated
from fxpipe.ir.errors import AnotherStrategy, Unsupported, is_itself, is_the_models
from fxpipe.ir.graph import stages_of
from fxpipe.ir.heap import give_back
from fxpipe.ir.log import warn
from fxpipe.ir.precision import full_precision
from fxpipe.ir.progress import phase
from fxpipe.ir.structure import Structure, map_tensors
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Asked, Compared, Meaning, refuse_unclear
from fxpipe.meaning.call import check_at_size
from fxpipe.meaning.errors import BatchWarning
from fxpipe.meaning.listed import Listed, in_parts, of_one_shape
from fxpipe.meaning.outputs import output_dims
from fxpipe.meaning.said import INFER, Input, named_inputs
from fxpipe.meaning.sample import Sample, batch_size, with_rows
from fxpipe.meaning.shared_draws import draws_for_shared
from fxpipe.meaning.weights import named_arguments
from fxpipe.planning.limits import free_memory
from fxpipe.planning.loss import (
    NO_TARGET,
    ExpectedLoss,
    SavedByLoss,
    has_loss,
    loss_seconds,
)
from fxpipe.planning.loss_timer import MeasuredLoss
from fxpipe.planning.question import CostedModel, PlanQuestion, copied, sketch
from fxpipe.planning.search import Choice
from fxpipe.runtime.compiled.stage import CompiledStages
from fxpipe.runtime.lanes import threads_of_a_lane
from fxpipe.runtime.microbatch import Dims
from fxpipe.runtime.state import STATEFUL
from fxpipe.trace import (
    CustomTracer,
    NeedsValues,
    Traced,
    TraceError,
    examine_users_code,
    runs_alike,
    trace,
    untouched,
    warn_of_what_is_gone,
)
from fxpipe.trace.arguments import written_arguments
from fxpipe.trace.errors import failure
from fxpipe.trace.flags import OF_INPUTS
from fxpipe.trace.leaked import refuse_leaked
from fxpipe.trace.premises import Premises, Reads, attributes_read
from fxpipe.trace.spread import as_on_one_device
from fxpipe.trace.twin import Twin
from passes.chain import ToStages
from passes.common.fakes import forget_history
from passes.partition.automatic import Auto


@dataclass
class _ModelGraph:
    """A traced model, on its way through the passes from the model graph to the stage graph."""

    traced: Traced
    context: ToStages
    chain: passes.Chain
    history: History
    reads: Reads
    """The attributes of the model that have been read."""

    def run(self, since: str | None = None, until: str | None = None) -> fx.GraphModule:
        """Run the passes of the chain from the one named ``since`` up to the one ahead of
        ``until``, by default from the first to the last, and return the graph."""
        gm = self.traced.graph_module
        for rewrite in self.chain.passes(self.context, since=since, until=until):
            gm = self.history(rewrite, gm)
        return gm

    def cut(self) -> fx.GraphModule:
        """Run the passes from "partition" up to the one ahead of "split". Returns a copy of the
        graph as pass "partition" has left it: later passes compute values again in other stages."""
        passes = self.chain.passes(self.context, since="partition", until="split")
        gm = self.history(next(passes), self.traced.graph_module)
        give_back()  # what the search of the cut has freed: the stages take memory of their own
        as_cut = copied(gm)
        for rewrite in passes:
            gm = self.history(rewrite, gm)
        self.traced.graph_module = gm
        return as_cut

    @property
    def out_dims(self) -> list[Dims]:
        """The batch dimensions of the outputs, as pass "outputs" has noted them."""
        return noted_dims(self.traced.graph_module)


class Staging(ABC):
    """Makes the mode of a call: traces the model, cuts its graph into stages, and places these.

    Args:
        model: the model; it is run, traced and changed as a twin of it until its stages are placed.
        layout: where the model has been cut already, so that it is cut alike; None if it has not.
    """

    def __init__(self, model: nn.Module, options: Options, layout: Layout | None = None) -> None:
        self.model = model
        self.options = options
        self.layout = layout or Layout(
            len(options.devices), options.checkpoint, options.checkpoint_segments
        )
        self.homes: dict[str, torch.device] = {}
        """The device of its stage for each tensor of the model that is still on "meta"."""
        self._slot = CacheSlot(model)
        """The place in the cache on disk of the compilation that is being made."""
        self._any_size = bool(options.dynamic)
        """Whether programs are compiled for all sizes of inputs that the model treats alike."""
        self._told: set[str] = set()
        """What the check has warned of, see :meth:`fxpipe.meaning.asked.Asked.warn`."""
        self._warned: set[str] = set()
        """The warnings that compilations have given, see :func:`fxpipe.ir.log.each_once`."""
        self._has_set_constants = False
        """Whether a call has been seen to set something that is no tensor on an argument, which may
        depend on the sizes. Later calls may set it, too, where it is what it was already."""
        self._target: Any = options.example_target
        """A target like that of the call that is compiled, with its tensors on "meta"; None: not
        known."""
        self._expected_loss: SavedByLoss | str = NO_TARGET
        """What the loss will save for its backward, or why nobody knows."""
        self._has_loss = True
        """Whether a training step of what is compiled now has a loss."""
        self._refused: frozenset[int] = frozenset()
        """Numbers of rows that the model does not take, as far as they have been tried."""

    @abstractmethod
    def forget(self) -> None:
        """Forget all compiled programs: parameters are about to move, which makes them wrong."""

    def is_on_meta(self) -> bool:
        """Whether parameters or buffers are on "meta", where they have no values; or other tensors,
        if the model has been compiled in that state. (Otherwise a tensor on "meta" that is neither
        does not count: a model may hold it for its shape.)"""
        own = (*self.model.parameters(), *self.model.buffers())
        return bool(self.homes) or any(tensor.is_meta for tensor in own)

    @property
    def _asked(self) -> Asked:
        """The options that say how the check reads a call."""
        options = self.options
        return Asked(
            options.in_dims,
            options.out_dims,
            False if self.is_on_meta() else options.check,
            options.sizes,
            options.weighs,
            returns_loss=options.loss_fn is None,
            training=options.training,
            told=self._told,
            deferred_batch_norm=options.deferred_batch_norm,
        )

    @property
    def _places(self) -> tuple[torch.device, ...] | tuple[int, ...]:
        """Where the tensors of each stage are: on its device."""
        return self.options.devices

    def _to_the_model(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the inputs to the device of the model, where the model can run before it is cut.

        The inputs stay where they are if the model is on several devices, or if its stages have
        been placed: in :meth:`_where_it_runs` it takes them from there. States, which are on the
        devices of several stages, are brought together. For a model that is not loaded yet the
        inputs are taken to "meta", whatever their values.
        """
        if self.is_on_meta():
            args, kwargs = map_tensors(_without_values, inputs)
            return args, kwargs
        own = (*self.model.parameters(), *self.model.buffers())
        homes = {tensor.device for tensor in own}
        is_placed = bool(self.layout.labels)
        if is_placed:
            homes = {tensor.device for tensor in Structure.of(inputs)[0][:1]}
        if len(homes) != 1:
            return inputs
        (home,) = homes

        def brought(tensor: Tensor) -> Tensor:
            if tensor.device == home or tensor.is_meta or (is_placed and tensor.is_cpu):
                return tensor
            return tensor.detach().to(home).requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(brought, inputs)
        return args, kwargs

    def _compile(
        self,
        twin: Twin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meaning: Meaning,
        call: GuardedCall,
    ) -> Mode:
        """Compile the model for batches of any size. Where it cannot be traced for any size, it is
        compiled for the size of this batch only.

        ``call`` is the call as the user has made it, from which the guards are made.
        """
        if meaning.listed is not None:
            return self._of_lists(twin, args, kwargs, meaning, meaning.listed, call)
        if meaning.one_row_only:
            return self._compiled(twin, args, kwargs, meaning, call, 1)
        try:
            return self._compiled(twin, args, kwargs, meaning, call)
        except AnotherStrategy as error:
            mode = self._of_one_size(twin, args, kwargs, meaning, call, error)
            if mode is None:
                raise
            return mode

    def _of_one_size(
        self,
        twin: Twin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meaning: Meaning,
        call: GuardedCall,
        why: AnotherStrategy,
    ) -> Mode | None:
        """A mode for this batch size only, with micro-batches of equal size; None if the model
        cannot be compiled that way either. Raises Unsupported if it can in no way."""
        batch = batch_size(Structure.of((args, kwargs))[0], meaning.in_dims)
        if not batch or not isinstance(why, TraceError) or isinstance(why, Unsupported):
            return None

        def compiled(chunks: int) -> Mode:
            tensors, _ = Structure.of((args, kwargs))
            with self._where_it_runs(twin.model, tensors), self._slot.hearing():
                check_at_size(twin.model, args, kwargs, meaning, self._asked, chunks)
            return self._compiled(twin, args, kwargs, meaning, call, chunks)

        try:
            mode = self._of_equal_parts(batch, compiled)
        except Unsupported as error:  # there is no other strategy: this says more than ``why``
            raise error from None
        except AnotherStrategy:  # the caller raises ``why`` then, which says more
            return None
        mode.why_one_size = str(why)
        return mode

    def _of_equal_parts(self, rows: int, compiled: Callable[[int], Mode]) -> Mode:
        """The mode for as many micro-batches of one size as are wanted, or for fewer, where the
        model does not take so few rows: a batch norm in training takes no single one.

        Args:
            compiled: makes the mode for a number of micro-batches.
        """
        *several, one = self.options.even_chunks_for(rows)
        for chunks in several:
            try:
                return compiled(chunks)
            except AnotherStrategy:
                raise
            except Exception as error:
                # The model may refuse so few rows, ahead of the trace (``is_itself``) or in it.
                if not (is_itself(error) or is_the_models(error)):
                    raise
        return compiled(one)

    def _of_lists(
        self,
        twin: Twin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meaning: Meaning,
        listed: Listed,
        call: GuardedCall,
    ) -> Mode:
        """A mode for lists of this length, with an element for each row: the model is traced with
        the list of the first micro-batch, and each element is an input of the graph."""
        mode = self._of_equal_parts(
            listed.rows, partial(self._of_parts_of_lists, twin, meaning, listed, call)
        )
        own = map_tensors(Tensor.detach, (args, kwargs))
        mode.rows, mode.example = listed.rows, Sample(own, meaning.in_dims, listed.rows)
        assert mode.chunks is not None
        mode.traced.bind = in_parts(self.model, mode.traced.bind, mode.chunks, self.options.in_dims)
        if mode.traced.front_end != "symbolic":
            of_one_shape(mode.traced.bind(args, kwargs), listed.names_have)
        return mode

    def _of_parts_of_lists(
        self, twin: Twin, meaning: Meaning, listed: Listed, call: GuardedCall, chunks: int
    ) -> Mode:
        """A mode for lists that are cut into so many parts of one length, each a micro-batch."""
        if text := self._of_fewer_lists(listed, chunks):
            warn(text)
            meaning = replace(meaning, notes=[*meaning.notes, text])
        rows = listed.rows // chunks
        one = replace(meaning, in_dims=listed.in_dims(rows))
        some, named = listed.part(0, rows)
        return self._compiled(twin, some, named, one, call, chunks)

    def _of_fewer_lists(self, listed: Listed, chunks: int) -> str:
        """What to say where there are fewer micro-batches than asked for, since they are of equal
        length; an empty string where there are not."""
        wanted = self.options.chunks_for(listed.rows)
        if chunks == wanted or (chunks > 1 and self.options.chooses_chunks):
            return ""
        run = "one micro-batch, stage after stage" if chunks == 1 else f"{chunks} micro-batches"
        return (
            f"{listed.names_have} {listed.rows} elements, which cannot be cut into {wanted} lists "
            f"of one length: they run as {run}; give lists whose length is a multiple of the "
            "number of micro-batches"
        )

    def _compiled(
        self,
        twin: Twin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meaning: Meaning,
        call: GuardedCall,
        chunks: int | None = None,
        entry: CacheEntry | None = None,
    ) -> Mode:
        """Compile the model up to the stage graph, and move its stages to their devices.

        Until the stages are moved, it is the twin that is run, traced and changed, not the model.

        With ``chunks`` the mini-batch is cut into so many micro-batches, and the model is traced
        with the first one: the graph is right for this batch size only. With an ``entry`` of the
        cache on disk its graph is taken, and the model is not traced.
        """
        options, dims = self.options, meaning.in_dims
        tensors, _ = Structure.of((args, kwargs))
        batch = batch_size(tensors, dims)
        traced_with = args, kwargs
        varying = [dim if isinstance(dim, int) else None for dim in dims]
        if chunks is not None:
            if batch is not None and meaning.listed is None:
                traced_with = with_rows((args, kwargs), dims, batch // chunks)
            varying = [None] * len(dims)

        compared = meaning.graph if chunks is None and not self._any_size else None
        with self._where_it_runs(twin.model, tensors):
            written = written_arguments(twin.model, *traced_with)
            self._has_set_constants |= written.sets_constants
            prepared = self._traced(
                twin.model, traced_with, varying, meaning, chunks, options.tracer, entry, compared
            )
        refuse_leaked(self.model, prepared.reads, prepared.traced.graph_module)
        reads = twin.reads(prepared.reads)
        traced = prepared.traced
        self._refused = traced.refused_sizes
        returned = traced.graph_module.graph, traced.rebuild
        rows = batch if chunks is None else (batch or 0) // chunks
        self._has_loss = has_loss(options.loss_fn, *returned, rows)
        self._expected_loss = self._loss_of(traced, batch, chunks)
        give_back()  # what the trace has freed: the cut and the stages take memory of their own
        as_cut = prepared.cut()
        stage_graph = prepared.run(since="split")
        with phase("twin", quiet=True):
            for gm in (prepared.traced.graph_module, as_cut, stage_graph):
                twin.restore(gm)
            prepared.traced.rebuild = twin.original(prepared.traced.rebuild)
            prepared.traced.settled = twin.settled(prepared.traced.settled)
            prepared.traced.left = twin.left(prepared.traced.left)
            twin.learned()
        premises = _but_for_states(reads) if entry is None else entry.reads(self.model)
        self._refuse_flags_of_inputs(premises, call)
        with phase("place", quiet=True):
            if options.training:
                refuse_separated(stage_graph, self._places)
            homes = place(self.model, stage_graph, options.devices)
        # A tensor that this graph does not use stays where an earlier graph uses it, or on the CPU.
        cpu = torch.device("cpu")
        if self.is_on_meta():
            self.homes = {name: homes[name] or self.homes.get(name, cpu) for name in homes}
        mode = Mode(
            traced=prepared.traced,
            as_cut=as_cut,
            arguments=named_arguments(self.model, args, kwargs),
            stage_graph=stage_graph,
            in_dims=dims,
            out_dims=prepared.out_dims,
            example=Sample.of(args, kwargs, dims, batch),
            guards=Guards(
                call,
                ONE_SIZE
                if self._has_set_constants
                else _kind(prepared.traced, None if meaning.listed else chunks),
                Premises(
                    self.model,
                    premises,
                    twin.tensors(prepared.traced.folded),
                    has_sizes=prepared.traced.front_end != "symbolic",
                    stateful=STATEFUL,
                    global_values=twin.global_values.settled(
                        self.model, prepared.traced.graph_module
                    ),
                ),
                prepared.traced.largest_batch,
                prepared.traced.sizes,
                self._parts(prepared.traced),
            ),
            chunks=chunks,
            notes=meaning.notes,
            expected_loss=self._expected_loss,
            is_checked=meaning.is_checked,
            differing=meaning.differing,
            written=written,
            history=prepared.history,
            compiled=None
            if options.stage_backend is None
            else CompiledStages(options.stage_backend),
        )
        for gm in (mode.model_graph, as_cut, stage_graph):
            mode.bindings += bindings(gm, self.model)
        for gm, device in zip(stages_of(stage_graph), options.devices, strict=True):
            mode.bindings += bindings(gm, self.model, device)
        rows = batch if meaning.listed is None else meaning.listed.rows
        inputs = named_inputs(self.model, args, kwargs, options.in_dims)
        self._tell_of_shared_draws(mode, inputs, rows)
        return mode

    def _refuse_flags_of_inputs(self, reads: Reads, call: GuardedCall) -> None:
        """Refuse an input that requires a gradient where the forward may branch by that: a model is
        traced and compared on inputs that do not. Refuse a call that records no gradients, too: a
        model is traced with gradients."""
        asks = any(name == OF_INPUTS for _, name in reads)
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        if asks and trains and not call.records_gradients:
            raise Unsupported(
                f"the forward of {type(self.model).__name__} asks whether a tensor requires a "
                "gradient (tensor.requires_grad), and this call records none. A graph has one "
                "branch only, that of calls which do. Let the forward branch by something else, "
                "such as self.training or an argument; or call the model itself, pipe.module, "
                "without gradients"
            )
        pairs = zip(call.paths, call.require_gradients, strict=True)
        if asks and (path := next((path for path, requires in pairs if requires), None)):
            raise Unsupported(
                f"the forward of {type(self.model).__name__} asks whether a tensor requires a "
                f"gradient (tensor.requires_grad), and the input {path} does. A graph has one "
                "branch only, that of inputs which do not. Give "
                f"{path}.detach(), or let the forward branch by something else, such as "
                "self.training or an argument"
            )

    def _tell_of_shared_draws(self, mode: Mode, inputs: Sequence[Input], rows: int | None) -> None:
        """Warn of random numbers that each micro-batch draws anew for an input as large as the
        batch, unless the user says that all micro-batches share that input.

        Args:
            inputs: those of the graph.
            rows: the number of rows of the mini-batch; None if no input has a batch dimension.
        """
        chunks = mode.chunks or self.options.chunks_for(rows, mode.traced.refused_sizes)
        if chunks == 1 or not self._asked.check:
            return
        pairs = enumerate(zip(inputs, mode.in_dims, strict=True))
        shared = [
            place
            for place, (each, dim) in pairs
            if dim is None and each.said is INFER and rows in each.tensor.shape
        ]
        if draws := draws_for_shared(mode.model_graph.graph, mode.in_dims, shared):
            warn(messages.shared_draws(inputs, mode.in_dims, draws), BatchWarning)

    def _traced(
        self,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        varying: list[int | None],
        meaning: Meaning,
        chunks: int | None,
        tracer: str | CustomTracer,
        entry: CacheEntry | None = None,
        compared: Compared | None = None,
    ) -> _ModelGraph:
        """Trace the model, unless it has been traced for the check (``compared``), and run the
        passes that come ahead of pass "partition"."""
        has_values = not self.is_on_meta()
        any_size = self._any_size and chunks is None
        # To note what code of the model reads takes time at each look-up of an attribute. An entry
        # of the cache has what was read for it.
        watch: Callable[[nn.Module], AbstractContextManager[Reads]] = (
            attributes_read if entry is None else lambda model: nullcontext({})
        )
        give_back()  # what the check has freed: runs of the model take memory of their own
        with watch(model) as reads:
            if compared is not None and (
                compared.as_it_runs or runs_alike(model, *inputs, compared.traced, varying)
            ):
                traced = compared.traced
                reads.update(compared.reads)
                with self._slot.hearing():
                    warn_of_what_is_gone(self.model, traced)
            elif entry is not None:
                with phase("graph from the cache", quiet=True):
                    traced = entry.traced_on(
                        model, inputs, batch_dims=varying, any_size=any_size, check=has_values
                    )
            else:
                with phase("trace"), self._slot.hearing():
                    traced = trace(
                        model,
                        *inputs,
                        tracer=tracer,
                        batch_dims=varying,
                        any_size=any_size,
                        check=has_values,
                    )
        if has_values:
            in_one_lane = len(self.options.devices) == 1
            examine_users_code(model, *inputs, traced, varying, in_one_lane=in_one_lane)
        if entry is None:
            self._slot.note(traced, model)
        traced.refused_sizes |= meaning.refused_sizes
        if chunks is None:
            self._refuse_other_branches(traced, traced.bind(*inputs), varying)
        context = self._to_stages(traced, inputs, meaning, chunks)
        history = History.observed(self.model, "stages", traced.graph_module, self.options.observer)
        prepared = _ModelGraph(traced, context, self.options.passes, history, reads)
        # Passes run code of the model only where nodes call its modules.
        calls = traced.graph_module.graph.find_nodes(op="call_module", sort=False)
        reading = watch(model) if calls else nullcontext({})
        try:
            with reading as more, untouched(model):
                traced.graph_module = prepared.run(until="partition")
            for attribute, state in more.items():
                reads.setdefault(attribute, state)
        except Exception as error:
            is_unchecked = not has_values and traced.front_end == "symbolic"
            may_differ = isinstance(error, AnotherStrategy) or is_the_models(error)
            needs_export = isinstance(error, NeedsValues) or (is_unchecked and may_differ)
            if tracer != "auto" or not needs_export or entry is not None:
                raise
            # Symbolic tracing has looked into a module whose shapes depend on values, so that a
            # pass fails on fake tensors. Export keeps such a module whole. And on "meta" a graph is
            # not compared with the model, so that a wrong one shows here.
            again = self._traced(model, inputs, varying, meaning, chunks, "export")
            again.traced.tried = failure(traced.front_end, error), *again.traced.tried
            return again
        forget_history(traced.graph_module.graph)
        return prepared

    def _refuse_other_branches(
        self, traced: Traced, values: list[Tensor], dims: list[int | None]
    ) -> None:
        """Raise TraceError if the model takes another branch for a micro-batch than for the
        mini-batch with which it has been traced: that branch is not in the graph."""
        batch = batch_size(values, dims)
        if traced.sizes is None or batch is None:
            return
        shapes = [tuple(value.shape) for value in values]
        broken = traced.sizes.broken(shapes, self._parts(traced)(batch))
        if broken is not None:
            where = f", by {broken.where}" if broken.where else ""
            raise TraceError(
                f"{type(self.model).__name__} goes another way for micro-batches than for the "
                f"mini-batch of {batch} rows{where}"
            )

    def _parts(self, traced: Traced) -> Callable[[int], tuple[int, ...]]:
        """From the rows of a mini-batch to the numbers of rows for which the model has to go the
        way that has been traced: those of its micro-batches, which the graph is run on, and its
        own, as what it computes is to be what the model computes."""
        options, refused = self.options, traced.refused_sizes
        return lambda rows: (rows, *options.sizes(rows, refused))

    def _to_stages(
        self,
        traced: Traced,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        meaning: Meaning,
        chunks: int | None,
    ) -> ToStages:
        """The settings from which the passes from the model graph to the stage graph are made."""
        options, values = self.options, traced.bind(*inputs)
        dims, found = meaning.in_dims, meaning.outputs
        several = options.chunks_for(batch_size(values, dims), traced.refused_sizes)

        unclear = partial(refuse_unclear, meaning, options.check)

        def output(gm: fx.GraphModule) -> list[Dims]:
            said = options.loss_weight if options.loss_fn is None else None
            out_dims, rebuild = options.out_dims, traced.rebuild
            return output_dims(gm, values, dims, out_dims, rebuild, found, said, unclear)

        context = ToStages(
            inputs=tuple(values),
            in_dims=tuple(dim if isinstance(dim, int) else None for dim in dims),
            devices=options.names,
            outputs=OutputDims(output),
            chunks=1 if chunks else several,
            chunks_asked_for=options.chunks,
            traced_chunks=chunks,
            # Once the model has been cut, costs no longer decide where: measuring would be in vain.
            costs="analytic" if self.layout.labels or self.is_on_meta() else options.costs,
            measured_on=options.devices[0],
            measured_with=threads_of_a_lane(options.lanes),
            deferred_batch_norm=options.deferred_batch_norm,
            optimizer_states=options.optimizer_states,
            optimizer_update=options.optimizer_update,
            spec=options.specs[0],
            training=options.training,
        )
        # Where the cut moves parameters, programs that have been compiled before are wrong.
        cut = CutAlike(self.layout, self._partition(context, inputs), self.forget)
        return replace(context, partition=cut)

    def _partition(
        self, context: ToStages, inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> passes.Pass:
        """The pass that cuts the model for the first time: as the plan that has been chosen for it,
        or as the user asks."""
        options = self.options
        cut = self._asked_for(context, inputs)
        if isinstance(options.choice, Choice) and options.costs != "measured":
            return AsChosen(options.choice, self.layout, cut, options.is_cut_automatic)
        return cut

    def _asked_for(
        self, context: ToStages, inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> passes.Pass:
        """The pass that cuts the model as the user asks, so that it fits where the memory of a lane
        is known."""
        options = self.options
        limits = options.memory or self._free_memory()
        if any(limit is not None for limit in limits):
            ways_out = partial(self._ways_out, context, inputs)
            known = lambda: self._has_loss, self._saved_by_loss
            return Fitting(options, limits, context, ways_out, self.layout, *known)
        chunks = context.traced_chunks or context.chunks
        cut = passes.Partition(
            len(options.devices),
            options.partition,
            chunks=chunks,
            checkpoint=options.checkpoint,
            loss=partial(self._seconds_of_loss, chunks),
        )
        has_own = isinstance(options.partition, Auto) and options.partition.devices is not None
        if len(set(options.names)) == 1 or has_own:
            return cut  # nothing has to travel, or the user says how it does
        return replace(
            cut,
            devices=tuple(options.specs[lane] for lane in options.placement),
            placement=tuple(options.names.index(name) for name in options.names),
        )

    def _seconds_of_loss(self, chunks: int, graph: fx.Graph) -> float:
        """The seconds that the loss of a mini-batch and its backward take in the last stage, as far
        as is known."""
        last = self.options.specs[self.options.placement[-1]]
        return chunks * sum(loss_seconds(self._saved_by_loss(), graph, chunks, last))

    def _saved_by_loss(self) -> SavedByLoss | None:
        """What the loss will save for its backward; None if nobody knows."""
        return self._expected_loss if isinstance(self._expected_loss, SavedByLoss) else None

    def _loss_of(self, traced: Traced, batch: int | None, chunks: int | None) -> SavedByLoss | str:
        """What the loss will save for its backward and how long it will take, or why nobody knows.
        ``chunks``: the number of micro-batches, one of which the model has been traced with; None:
        with all of them.

        The function is called if the model is compiled for a training step, or if the user gives an
        example of the target.
        """
        options = self.options
        if options.loss_fn is None or self._target is None:
            return NO_TARGET
        rows = (batch // chunks, batch) if batch and chunks else (0, 0)
        expected = ExpectedLoss(options.loss_fn, self._target, traced.rebuild, rows)
        graph = traced.graph_module.graph
        with phase("loss", quiet=True):
            found = expected.saved(graph)
            is_measured = options.costs == "measured" and not self.layout.labels
            if isinstance(found, str) or not is_measured or self.is_on_meta():
                return found
            several = chunks or options.chunks_for(batch, traced.refused_sizes)
            some = (batch or 0) // several
            return MeasuredLoss(
                expected,
                (some if chunks else batch or 0, some),
                options.devices[0],
                options.specs[0],
                threads_of_a_lane(options.lanes),
            )(found, graph)

    def _free_memory(self) -> tuple[float | None, ...]:
        """The bytes that the model may take on each lane, if the user does not say it; None where
        that is not known."""
        return free_memory(self.options.lanes, self.model)

    def _ways_out(
        self,
        context: ToStages,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        question: PlanQuestion,
    ) -> str:
        """A sentence that says with which other options the model would fit."""
        options = self.options
        if context.traced_chunks is not None:
            return question.ways_out(None)
        dims = list(context.in_dims)
        traced, known = sketch(
            self.model,
            *inputs,
            dims,
            options.tracer,
            options.chunks,
            options.passes,
            options.training,
        )
        known = replace(
            known,
            spec=context.spec,
            optimizer_states=context.optimizer_states,
            optimizer_update=context.optimizer_update,
        )
        prices = CostedModel(
            *(self.model, traced.graph_module, known, options.passes),
            has_loss=self._has_loss,
            refused=self._refused,
        )
        return replace(question, prices=prices).ways_out(batch_size(context.inputs, dims))

    @contextmanager
    def _where_it_runs(self, model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
        """A context in which the model can run as a plain module, to be compared with itself: in
        full precision, and if its stages have been placed on several devices, as if it were on the
        device of the inputs."""
        is_apart = self.layout.labels and inputs
        together = as_on_one_device(model, inputs[0].device) if is_apart else nullcontext()
        with full_precision(), together:
            yield


def _without_values(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _kind(traced: Traced, chunks: int | None) -> str:
    """For which sizes of inputs a program is right. ``chunks`` is None unless it is for one batch
    size only."""
    if chunks is not None:
        return ONE_SIZE
    return ANY_SHAPES if traced.front_end == "symbolic" else ANY_SIZE


def _but_for_states(reads: Reads) -> Reads:
    """The attributes that a graph depends on. Those of a module that is kept whole because it
    changes them are left out: its forward runs, and reads them, in every call."""
    return {(module, n): value for (module, n), value in reads.items() if module not in STATEFUL}
