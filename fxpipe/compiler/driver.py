"""The driver of a compilation: it looks up what has been compiled for a kind of call, or has the
model checked, traced and cut for it, and has the stage graph lowered to programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler import written_again
from fxpipe.compiler.cache import Cache
from fxpipe.compiler.compilations import timed_into
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.deciding import decided
from fxpipe.compiler.disk.entry import CacheEntry
from fxpipe.compiler.disk.errors import Unusable
from fxpipe.compiler.disk.folder import Folder
from fxpipe.compiler.disk.slot import READ, CacheSlot
from fxpipe.compiler.garbage import older_objects_set_aside
from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.later_checks import LaterChecks
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.log import log_compilation, log_cut, log_reasons, logged, wants_log
from fxpipe.compiler.loss import MiniBatch, Target
from fxpipe.compiler.lowering import Lowering
from fxpipe.compiler.options import Options
from fxpipe.ir._torch import parametrizations_computed, transforms
from fxpipe.ir.errors import Unsupported
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.log import each_once, warn
from fxpipe.ir.progress import phase
from fxpipe.ir.structure import Structure, map_tensors
from fxpipe.loading.storage import without_values
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Meaning
from fxpipe.meaning.asking import Trace
from fxpipe.meaning.call import known_dims, meaning_of, remember_dims
from fxpipe.meaning.numbers_read import (
    buffers_read,
    numbers_in,
    sizes_of,
)
from fxpipe.meaning.sample import batch_size, out_of_inference_mode
from fxpipe.planning.loss import NO_TARGET
from fxpipe.planning.loss import without_values as target_without_values
from fxpipe.planning.search import Choice
from fxpipe.runtime.ambient import compiling
from fxpipe.runtime.apart import plain
from fxpipe.trace import canonical, refuse_iterators, refuse_lazy, refuse_nested, to_be_compared
from fxpipe.trace.arguments import nothing_put_into
from fxpipe.trace.patches import prints, quiet
from fxpipe.trace.twin import Twin


class Compiler(LaterChecks):
    """Compiles a model for each kind of call, and caches what it has compiled.

    Args:
        layout: where the model has been cut already, so that it is cut alike; None if it has not.
    """

    def __init__(self, model: nn.Module, options: Options, layout: Layout | None = None) -> None:
        super().__init__(model, options, layout)
        self.lowering = Lowering(model, options, self.layout)
        self.cache = Cache(model)
        self._step_target: Any = None
        self._folder = None if options.cache is None else Folder(options.cache)
        self._lock = threading.RLock()

    def ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> tuple[Mode, list[Any], int]:
        """The mode for a call, which is compiled now if there is none yet; the values of its
        inputs, in the order of the placeholders; and the number of micro-batches. ``target``: that
        of a training step, from which it is known what the loss will save, and how long it takes.
        """
        with self._lock, self._given(target):
            if self.homes:
                self.notice_values()
            mode, values = self._checked(args, kwargs)
            if mode.is_outdated:
                self.cache.drop(mode)
                mode, values = self._checked(args, kwargs)
            if self._notice_sizes_of_model(mode, mode.batch_of(values), args, kwargs):
                self._tell_of_one_microbatch(mode, args, kwargs)
            refused = mode.traced.refused_sizes
            chunks = mode.chunks or self.options.chunks_for(mode.batch_of(values), refused)
            return mode, values, chunks

    @contextmanager
    def _given(self, target: Any) -> Iterator[None]:
        """A context for a call with this target; None: for one that has no loss."""
        self._step_target = target
        try:
            yield
        finally:
            self._step_target = None

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mode, list[Any]]:
        """The mode for a call, and the values of its inputs, once it has been looked at what of the
        call may change what micro-batches mean."""
        mode, values = self._found(args, kwargs)
        mode.refresh()
        mode.settle()
        self._notice_labels_in(mode, values, args, kwargs)
        self._notice_numbers_in(mode, values, args, kwargs)
        return mode, values

    def pipeline(self, mode: Mode, chunks: int) -> Unrolled:
        """The pipeline graph for ``chunks`` micro-batches, lowered to programs; cached in the
        mode."""
        with self._lock:
            if chunks not in mode.unrolled:
                with self._lowering_of(f"pipeline of {chunks} micro-batches"):
                    mode.unrolled[chunks] = self.lowering.pipeline(mode, chunks)
                mode.refresh()
            return mode.unrolled[chunks]

    def step(self, mode: Mode, chunks: int, batch: MiniBatch) -> tuple[Unrolled, Target]:
        """The step graph for ``chunks`` micro-batches and targets of this structure, lowered to
        programs, and how it reads the target; cached in the mode."""
        key = chunks, *((target.nesting, target.has_batch) for target in batch.readings)
        with self._lock:
            known = mode.losses.get(key)
            is_checked = known is None or not known.is_decided
            if is_checked:
                with self._lowering_of(f"step of {chunks} micro-batches"):
                    with phase("loss", quiet=True):
                        found = self._loss_dim(mode, batch, chunks, self._asked)
                    mode.losses[key] = mode.of_loss.note(found)
                    mode.loss_numbers.pop(key, None)
                    self._watch(mode, found)
                    self._step_of(mode, key, batch)
                    self._see_loss(mode, batch)
                self._tell_of_hooks()
            self._notice_labels(mode, batch, key, is_checked)
            is_new = self._notice_numbers(mode, batch, key)
            is_odd = self._notice_sizes_of_loss(mode, batch, key, is_checked)
            is_due = self.options.loss_fn is not None and self._is_due(mode.of_loss)
            if (is_due or is_new or is_odd) and not is_checked:
                self._tell_of_loss(mode, batch, key)
            return self._step_of(mode, key, batch)

    def _see_loss(self, mode: Mode, batch: MiniBatch) -> None:
        """Count what the loss does, for predictions, if no target was known when the model was cut
        and this first mini-batch is as large as the example."""
        is_known = mode.expected_loss != NO_TARGET or mode.seen_loss is not None
        if is_known or batch.target is None or mode.batch_in(*batch.inputs) != mode.example.batch:
            return
        self._target = target_without_values(batch.target)
        found = self._loss_of(mode.traced, mode.example.batch, mode.chunks)
        if isinstance(found, str):
            mode.expected_loss = found
        else:
            mode.seen_loss = found

    def _step_of(self, mode: Mode, key: Any, batch: MiniBatch) -> tuple[Unrolled, Target]:
        """The step graph by what has been found out about the loss, and how it reads the target."""
        found = mode.losses[key]
        target, taken = batch.readings[found.place], (found.place, found.dim)
        if (*key, taken) not in mode.steps:
            mode.steps[(*key, taken)] = self.lowering.step(mode, key[0], target, found.dim)
            mode.refresh()
            self._tell_of_written_again(mode, mode.steps[(*key, taken)])
        return mode.steps[(*key, taken)], target

    def _tell_of_written_again(self, mode: Mode, step: Unrolled) -> None:
        """Warn of buffers that a checkpoint of the model's own writes to in another order than in a
        loop over the micro-batches."""
        found = written_again.out_of_order(mode.stage_graph, step.graph_module)
        if found and self.options.check:
            self._asked.warn(written_again.said(found))

    def _tell_of_hooks(self) -> None:
        """Warn of hooks on the model itself: those of its calls, which a step does not make."""
        if has_hooks(self.model):
            warn(
                f"hooks on {type(self.model).__name__} itself are not called in pipe.step, which "
                "has no output of the whole mini-batch: what they change is lacking there. Put "
                "them on a part of the model, or train by pipe(x) and loss.backward()"
            )

    @contextmanager
    def _working(self, title: str) -> Iterator[None]:
        """A context for a compilation: the time of each phase is taken, and logged if the user asks
        for it, no warning is given that an earlier compilation has given, an error is noted, and no
        parametrization is cached."""
        title = f"{type(self.model).__name__}: {title}"
        is_shown = self.options.verbose or wants_log()
        noted = self.compilations.refusals_noted()
        once, computed = each_once(self._warned), parametrizations_computed()
        with older_objects_set_aside(), logged(title, is_shown), once, noted, computed:
            yield

    @contextmanager
    def _lowering_of(self, title: str) -> Iterator[None]:
        """:meth:`_working`, for a graph of all micro-batches, which comes after a compilation."""
        with timed_into(self.compilations.lowered), self._working(title):
            yield

    def forget(self) -> None:
        """Forget all compiled programs, so that the next call is compiled; the cut of the model
        stays."""
        with self._lock:
            self.cache.forget()

    def notice_values(self) -> None:
        """Take note of which tensors have values by now. Once all of them have, the model is
        compiled anew at its next call, with the same cut: what it means can be checked then. If
        nothing is to be checked, it stays as it was compiled on "meta"."""
        unset = self.lacking()
        if self.homes and not unset:
            self._have_values()
        self.homes = {name: home for name, home in self.homes.items() if name in unset}

    def lacking(self) -> dict[str, Tensor]:
        """The tensors of the model that are on "meta" and need values here, by name."""
        return without_values(self.model)

    def _have_values(self) -> None:
        """Forget programs that have been compiled without values, unless they can serve."""
        graphs = [mode.stage_graph for mode in self.cache.modes]
        if self.options.check is not False or any(map(without_values, graphs)):
            self.forget()

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mode, list[Any]]:
        """The mode that serves a call, which is compiled now if there is none, and the values of
        its inputs."""
        found = self.cache.at_once(args, kwargs)
        if found is not None:
            return found
        dims = known_dims(self.model, args, kwargs, self.options.in_dims)
        mode = None
        if dims is not None:
            mode = self.cache.mode(GuardedCall(self.model, args, kwargs, dims))
        if mode is None:
            with self._working("compiling a new kind of call"):
                mode = self._new(args, kwargs)
            self._tell_of_one_microbatch(mode, args, kwargs)
        values = mode.traced.bind(args, kwargs)
        self.cache.remember(args, kwargs, mode, values)
        return mode, values

    def _tell_of_one_microbatch(
        self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Warn of a mini-batch of several rows that is not cut, although that was asked for."""
        rows = mode.batch_in(args, kwargs)
        chunks = mode.chunks or self.options.chunks_for(rows, mode.traced.refused_sizes)
        if chunks == 1 and self.options.chunks_for(rows) > 1 and self.options.check:
            self._asked.warn(messages.one_microbatch(rows or 0, mode.notes))

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mode:
        if transforms():
            raise RuntimeError(
                "a pipeline cannot be compiled inside of a torch.func transform: call it once "
                "before, or give example_inputs to compile()"
            )
        refuse_iterators(self.model, args, kwargs)
        if self._step_target is not None:
            self._target = target_without_values(self._step_target)
        else:
            self._target = self.options.example_target
        name, cut = type(self.model).__name__, self.layout.labels
        at, begin = datetime.now(), time.perf_counter()
        records_gradients = torch.is_grad_enabled()  # not as while the model is compiled
        some, named = map_tensors(plain, canonical(self.model, args, kwargs))
        with compiling(), quiet(), prints(), nothing_put_into(self.model, args, kwargs):
            inputs = self._to_the_model(out_of_inference_mode((some, named)))
            with self._nothing_open(inputs):
                with phase("key", quiet=True):
                    self._slot = self._slot_of(args, kwargs, inputs)
                entry = self._slot.entry()
                try:
                    mode, why = self._new_or_found(args, kwargs, inputs, entry, records_gradients)
                except Unusable as error:
                    self._slot.refuse(error)
                    mode, why = self._new_or_found(args, kwargs, inputs, None, records_gradients)
        if not why:
            return mode
        front_end, seconds = mode.traced.front_end, time.perf_counter() - begin
        self.compilations.note(at, seconds, why, mode.guards, front_end, self._slot.state)
        log_compilation(name, self.compilations[-1])
        if self.layout.labels is not cut:
            log_cut(name, mode, self.options, self.layout)
        return self.cache.learn(mode)

    def _decided(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Choice | str:
        """What is chosen for this first call, where the user leaves something open."""
        options, (args, kwargs) = self.options, inputs
        model = Twin(self.model).model
        with self._where_it_runs(model, Structure.of((args, kwargs))[0]):
            memory = options.memory or self._free_memory()
            return decided(model, inputs, options, memory, self._target)

    @contextmanager
    def _nothing_open(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[None]:
        """A context in which all that the user leaves open has been chosen, as if the user had said
        it. A call that fails there ahead of the cut has chosen nothing for later ones."""
        before = self.options
        if before.is_open:
            with phase("choice"):
                self._settle(before.decided(self._decided(inputs)))
        try:
            yield
        except BaseException:
            if self._may_open_again():
                self._settle(before)
            raise

    def _settle(self, options: Options) -> None:
        self.options = self.lowering.options = options
        self.layout.stages = len(options.devices)

    def _may_open_again(self) -> bool:
        """Whether parameters have no stages yet."""
        return not self.layout.labels

    def _new_or_found(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        entry: CacheEntry | None,
        records_gradients: bool,
    ) -> tuple[Mode, tuple[str, ...]]:
        """A new mode for a call, and why it has been compiled; or a mode that there is, and nothing
        to say, if the check finds that it serves the call.

        Args:
            inputs: the arguments, where the model can run with them.
            entry: what the cache on disk has for this call.
            records_gradients: whether the call records gradients.

        Raises:
            Unusable: if the model cannot be compiled from the entry.
        """
        some, named = inputs
        refuse_lazy(self.model)
        refuse_nested(self.model, some, named)
        with phase("twin", quiet=True):
            twin = Twin(self.model)  # another thread may run the model while it is compiled
        if entry is None:
            of_a_graph = None
            if not self._any_size and not self._has_new_sizes(
                GuardedCall(self.model, args, kwargs)
            ):
                of_a_graph = partial(to_be_compared, twin.model, some, named, self.options.tracer)
            with phase("check"), self._slot.hearing():
                meaning = self._meaning(twin.model, some, named, of_a_graph)
        else:
            meaning = entry.meaning_for(Structure.of(inputs)[0])
            remember_dims(self.model, some, named, self.options.in_dims, meaning.in_dims)
        if batch_size(Structure.of(inputs)[0], meaning.in_dims) == 0:
            raise Unsupported(
                "this mini-batch has no rows, and a model is compiled with the rows of its first "
                "call: give one with two rows or more first, or as example_inputs; empty ones are "
                "taken after that"
            )
        call = GuardedCall(self.model, args, kwargs, meaning.in_dims, records_gradients)
        mode = self.cache.mode(call)
        if mode is not None:  # found now that the batch dimensions are known
            return mode, ()
        guards = [each.guards for each in self.cache.modes]
        why = self.compilations.why(call, guards)
        log_reasons(type(self.model).__name__, why)
        self._any_size |= self._has_new_sizes(call)
        if entry is None:
            mode = self._compile(twin, some, named, meaning, call)
            self._slot.keep(meaning, mode.chunks, mode.guards.state.attributes())
        else:
            mode = self._compiled(twin, some, named, meaning, call, entry.chunks, entry)
            self._slot.state = READ
            for each in entry.said:
                each.again()
        mode.outputs_checked = mode.of_model.note(meaning).outputs
        mode.goes_by_size = meaning.goes_by_size
        return mode, why

    def _has_new_sizes(self, call: GuardedCall) -> bool:
        """Whether a call differs from an earlier one by sizes, so that from now on programs are
        compiled for all sizes."""
        guards = (mode.guards for mode in self.cache.modes)
        return self.options.dynamic is None and any(each.other_sizes(call) for each in guards)

    def _slot_of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> CacheSlot:
        """The place of a call in the cache on disk."""
        if self._folder is None:
            return CacheSlot(self.model)
        has_new_sizes = self._has_new_sizes(GuardedCall(self.model, args, kwargs))
        settings = {
            "any size": self._any_size or has_new_sizes,
            "dims": known_dims(self.model, args, kwargs, self.options.in_dims),
            "checked": not self.is_on_meta(),
            "numbers": sizes_of(
                [
                    *(read() for read in buffers_read(self.model)),
                    *numbers_in(Structure.of(inputs)[0]),
                ]
            ),
            "compiler": type(self).__name__,  # ranks refuse what cannot be checked
        }
        return CacheSlot.of(self._folder, self.model, inputs, self.options, settings)

    def _meaning(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trace: Trace | None = None,
    ) -> Meaning:
        """The batch dimensions of the inputs and outputs of this call, checked by running
        ``model``, a twin of the compiler's model, and the graph that ``trace`` makes of it."""
        tensors, _ = Structure.of((args, kwargs))
        with self._where_it_runs(model, tensors):
            return meaning_of(model, args, kwargs, self._asked, trace)
