"""Later checks: whether what the check has found out about a model and its loss still holds.

::

    call, step ──┬── labels    that a loss leaves out, in unequal shares for the micro-batches
                 ├── sizes     of micro-batches that are new
                 ├── numbers   that a model or a loss reads, others than those it was checked with
                 └── count     of the mini-batches of a loss: the 2nd, 8th, 32nd, ...
                        │
                  check once more, with this mini-batch ── warning

What micro-batches mean is checked with the first mini-batch of each kind of call. Some of it
follows from what a later mini-batch has, or from a number that training code changes. Whether these
are others is looked at in each call, which costs little; the check itself runs once more only then.
There are more ways to leave a label out than can be looked for (a table that is indexed by labels,
the number of boxes in a list), so a loss is also checked with mini-batches at growing distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.compiler.compilations import Compilations, timed_into
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.log import logged, wants_log
from fxpipe.compiler.loss import MiniBatch
from fxpipe.compiler.options import Options
from fxpipe.compiler.staging import Staging
from fxpipe.ir.structure import Structure, map_tensors
from fxpipe.loss_weight import IGNORED
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Asked, Meaning
from fxpipe.meaning.batches import Batches, Finding
from fxpipe.meaning.call import meaning_of, takes_size
from fxpipe.meaning.left_out import (
    MOST,
    MOST_OF_OTHERS,
    LabelCondition,
    LabelWatch,
    conditions_in,
    whatever_it_does,
)
from fxpipe.meaning.loss_beside import StagesBeside
from fxpipe.meaning.loss_of_target import FoundLoss, Targets, loss_dim, loss_takes_sizes
from fxpipe.meaning.numbers_read import (
    ModelNumbers,
    NumbersRead,
    NumberWatch,
    TextsGiven,
    numbers_in,
    switches_in,
)
from fxpipe.meaning.sample import out_of_inference_mode
from fxpipe.runtime.ambient import compiling
from fxpipe.runtime.apart import plain
from fxpipe.runtime.microbatch import SUM, WEIGHTED
from fxpipe.trace import canonical
from fxpipe.trace.patches import prints, quiet
from fxpipe.trace.twin import Twin

MOST_SIZES = 16
"""With how many sizes of micro-batches a model or a loss is checked. There are one or two of them
where the last mini-batch of a data set is smaller than the others."""


class LaterChecks(Staging):
    """The part of a compiler that notices labels and numbers by which the check would find out
    something else. The arguments are those of the compiler."""

    def __init__(self, model: nn.Module, options: Options, layout: Layout | None = None) -> None:
        super().__init__(model, options, layout)
        self.compilations = Compilations(type(model).__name__)
        self._of_loss: NumbersRead | None = None  # those of the loss function, once it has run

    def _loss_dim(self, mode: Mode, batch: MiniBatch, chunks: int, asked: Asked) -> FoundLoss:
        """What the check finds out about the loss function with a mini-batch.

        Its inputs and its target belong together. Inputs of an earlier call might have another
        length, or another size of pictures, and what a loss makes of an output of one size and a
        target of another one says nothing about it.
        """
        function = self.options.loss_fn
        if function is None:
            return FoundLoss(0, mode.loss_dim)
        if chunks == 1 or not (mode.rows or mode.example.batch):
            return FoundLoss(0, None)
        with self._on_inputs(*batch.inputs) as (model, (some, named)):
            if any(tensor.is_meta for tensor in Structure.of((some, named))[0]):
                return FoundLoss(0, None, is_decided=False)  # there are no values to check with
            return loss_dim(
                model,
                (some, named),
                mode.example.dims,
                function,
                [Targets(e.leaves, e.has_batch, e.nesting.fill) for e in batch.readings],
                self._at_sizes(mode, asked),
                mode.output_dims,
                StagesBeside.of(mode.traced.left, mode.model_graph, mode.stage_graph),
            )

    def _watch(self, mode: Mode, found: FoundLoss) -> None:
        """From now on look for labels that the loss function leaves out."""
        is_mean = found.dim == WEIGHTED or (found.dim is None and self.options.loss_weight is None)
        if mode.left_out is None and is_mean and self.options.check:
            mode.left_out = self._watch_of_labels(found.left_out)

    def _watch_of_labels(self, conditions: Iterable[LabelCondition]) -> LabelWatch:
        """A watch of labels for these conditions."""
        return LabelWatch(conditions)

    def _notice_labels(self, mode: Mode, batch: MiniBatch, key: Any, is_checked: bool) -> None:
        """Notice labels in a target that the loss function leaves out, once micro-batches have
        unequal shares of them.

        ``is_checked``: whether the loss function has just been checked with this target. Then it
        had yet to be found out what to look for, so that the check may have met none of them.
        """
        target = batch.readings[mode.losses[key].place]
        leaves = zip(target.leaves, target.has_batch, strict=True)
        labels = [(leaf, 0) for leaf, is_cut in leaves if is_cut and isinstance(leaf, Tensor)]
        rows = len(labels[0][0]) if labels else 0
        sizes = self.options.sizes(rows, mode.traced.refused_sizes) if rows else ()
        if mode.left_out is None:
            return
        if mode.left_out.meets(labels, sizes, wait=is_checked):
            asked = self._asked_again(mode.left_out.counts)
            self._tell_of_labels(
                mode.of_loss, partial(self._loss_decided_again, mode, batch, key, asked)
            )

    def _notice_labels_in(
        self, mode: Mode, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The same for labels among the inputs of a model that returns its loss."""
        options = self.options
        if options.loss_fn is not None or self._is_said or not mode.labels:
            return
        is_checked = mode.left_out is None  # with this call, for which it has been compiled
        if mode.left_out is None:
            conditions = self._conditions_in(mode, values) if options.check else ()
            mode.left_out = self._watch_of_labels(conditions)
        rows, refused = mode.batch_of(values) or 0, mode.traced.refused_sizes
        labels = [(values[each.place], each.dim) for each in mode.labels]
        sizes = options.sizes(rows, refused)
        if mode.left_out.meets(labels, sizes, wait=is_checked) and not is_checked:
            asked = self._asked_again(mode.left_out.counts)
            check = partial(self._outputs_decided_again, mode, args, kwargs, asked)
            self._tell_of_labels(mode.of_model, check)

    def _conditions_in(self, mode: Mode, values: Sequence[Any]) -> Iterator[LabelCondition]:
        """By what a model that returns its loss may tell which labels count: by what its graph
        says, of which only the likeliest is for inputs that are not named as labels, since each
        leads to a check when it is first met; and by what need not be seen in the graph."""
        of_graph = [LabelCondition("eq", IGNORED, is_sure=True), *conditions_in(mode.model_graph)]
        known = dict.fromkeys(of_graph)
        for i, label in enumerate(mode.labels):
            most = MOST if label.is_named else MOST_OF_OTHERS
            unsure = [each for each in known if not each.is_sure]
            if not label.is_named:
                unsure.sort(key=lambda each: not each.is_of_any_input)
            chosen = [each for each in known if each not in unsure[most:]]
            yield from (replace(each, place=i) for each in chosen)
            found = whatever_it_does([(i, values[label.place])])
            yield from (each for each in found if label.is_named or each.is_of_any_input)

    def _asked_again(self, counts: Sequence[Tensor] = ()) -> Asked:
        """The options of a check in the middle of training, where nothing is refused, with samples
        whose rows differ by these ``counts``."""
        return replace(self._asked, check="warn", counts=counts, is_again=True)

    def _check_again(
        self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Meaning:
        """Check the model with another mini-batch of a kind of call that has been compiled."""
        with self._on_inputs(args, kwargs) as (model, (some, named)):
            return meaning_of(model, some, named, asked, compiled=mode.in_dims)

    @contextmanager
    def _on_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]]:
        """A context in which a twin of the model can run on the inputs of a call: the twin, and the
        inputs as it takes them."""
        some, named = map_tensors(plain, canonical(self.model, args, kwargs))
        with compiling(), quiet(), prints():
            some, named = self._to_the_model(out_of_inference_mode((some, named)))
            model = Twin(self.model).model
            with self._where_it_runs(model, Structure.of((some, named))[0]):
                yield model, (some, named)

    def _notice_numbers_in(
        self, mode: Mode, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Notice numbers that the model reads, once they are others than those it was checked
        with; and a mini-batch of a model that returns its loss that is to be checked in any
        case."""
        if not self.options.check:
            return
        returns_loss = self.options.loss_fn is None and bool(mode.labels)
        is_due = returns_loss and self._is_due(mode.of_model)
        if mode.numbers is None:  # this is the call for which it has been compiled
            is_cut = [dim is not None for dim in mode.in_dims]
            mode.numbers = ModelNumbers(self.model, values, is_cut)
        elif mode.numbers.watch.is_new(mode.numbers.read(values)) or is_due:
            asked = self._asked_again()
            check = partial(self._outputs_decided_again, mode, args, kwargs, asked)
            self._tell_of_numbers(mode.of_model, check)

    def _notice_numbers(self, mode: Mode, batch: MiniBatch, key: Any) -> bool:
        """Whether numbers that the loss function reads, by itself or from a target, are others than
        those it was checked with for such a target; or may be, as nothing is known of these."""
        if self.options.loss_fn is None or not self.options.check or key[0] == 1:
            return False
        if self._of_loss is None:
            self._of_loss = NumbersRead(self.options.loss_fn)
        target = batch.readings[mode.losses[key].place]
        leaves = zip(target.leaves, target.has_batch, strict=True)
        given = [each for leaf, is_cut in leaves if not is_cut for each in _values_in(leaf)]
        texts = mode.loss_texts.setdefault(key, TextsGiven()).numbers_in(given)
        numbers = [*self._of_loss.values(), *numbers_in(given), *texts]
        if mode.numbers is not None:
            numbers += mode.numbers.now
        watch = mode.loss_numbers.get(key)
        if watch is None:
            mode.loss_numbers[key] = NumberWatch(numbers)
            return True
        return watch.is_new(numbers)

    def _notice_sizes_of_model(
        self, mode: Mode, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Check a model that takes some numbers of rows only, in pairs, say, with each new size of
        micro-batches. A size for which it gives something else is refused from now on: a
        mini-batch is cut into fewer micro-batches then. Returns whether that is so by now."""
        before = mode.traced.refused_sizes
        if not (mode.goes_by_size and self.options.check and rows) or mode.chunks or mode.rows:
            return False
        while len(mode.sizes_checked) < MOST_SIZES and not self.is_on_meta():
            sizes = self.options.sizes(rows, mode.traced.refused_sizes)
            new = sorted({*sizes} - mode.sizes_checked) if len(sizes) > 1 else []
            if not new:
                break
            mode.sizes_checked |= {*new}
            with self._on_inputs(args, kwargs) as (model, (some, named)):
                refused = [
                    size
                    for size in new
                    if not takes_size(model, some, named, mode.in_dims, self._asked, size)
                ]
            mode.traced.refused_sizes |= {*refused}
        return mode.traced.refused_sizes != before

    def _notice_sizes_of_loss(
        self, mode: Mode, batch: MiniBatch, key: Any, is_checked: bool
    ) -> bool:
        """Whether the loss function is to be checked again, since this mini-batch is cut into
        micro-batches of a size that is new, with which their losses do not make that of the
        mini-batch.

        ``is_checked``: whether the loss function has just been checked with it.
        """
        function, found = self.options.loss_fn, mode.losses[key]
        is_mean_or_sum = found.dim in (None, SUM) and self.options.loss_weight is None
        is_cut = key[0] > 1 and not mode.rows
        if function is None or not self.options.check or not is_mean_or_sum or not is_cut:
            return False
        target = batch.readings[found.place]
        leaves = zip(target.leaves, target.has_batch, strict=True)
        cut = (len(leaf) for leaf, is_cut in leaves if is_cut and isinstance(leaf, Tensor))
        rows = next(cut, None) or mode.batch_in(*batch.inputs) or 0
        sizes = self.options.sizes(rows, mode.traced.refused_sizes)
        known = mode.loss_sizes.setdefault(key, set())
        new, is_full = {*sizes} - known, len(known) >= MOST_SIZES
        known |= new
        if is_checked or not new or is_full or mode.of_loss.is_over or self.is_on_meta():
            return False
        with self._on_inputs(*batch.inputs) as (model, inputs):
            return not loss_takes_sizes(
                model,
                inputs,
                mode.example.dims,
                function,
                Targets(target.leaves, target.has_batch, target.nesting.fill),
                self._at_sizes(mode, self._asked_again()),
                mode.output_dims,
                found.dim,
            )

    def _at_sizes(self, mode: Mode, asked: Asked) -> Asked:
        """The options of a check with micro-batches of the sizes that the model takes."""
        return replace(asked, sizes=lambda n: self.options.sizes(n, mode.traced.refused_sizes))

    @property
    def _is_said(self) -> bool:
        """Whether the user has said that the loss is a mean over the rows, or that it is a sum."""
        return self.options.loss_weight is not None and not callable(self.options.loss_weight)

    def _is_due(self, batches: Batches) -> bool:
        """Whether the loss of a mini-batch is to be checked, whatever the mini-batch has."""
        is_checked = bool(self.options.check) and not self._is_said
        return is_checked and batches.are_due()

    def _outputs_decided_again(
        self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Finding:
        """What the check finds out about the model with a later mini-batch. Where an output is no
        mean any more but a sum, or no sum but a mean, the model is to be compiled anew."""
        found = self._check_again(mode, args, kwargs, asked)
        for path, dim in found.outputs.items():
            before = mode.outputs_checked.get(path, dim)
            if dim != before and SUM in (dim, before) and path not in found.unclear:
                mode.is_outdated = True
                if path not in found.differing:
                    asked.warn(messages.put_together_from_now_on(path, before == SUM))
        return found

    def _tell_of_loss(self, mode: Mode, batch: MiniBatch, key: Any) -> None:
        """Check the loss function again, which is put together as it is found to be."""
        check = partial(self._loss_decided_again, mode, batch, key, self._asked_again())
        self._tell_of_numbers(mode.of_loss, check)

    def _loss_decided_again(
        self, mode: Mode, batch: MiniBatch, key: Any, asked: Asked
    ) -> FoundLoss:
        """What the check finds out about the loss function with a later mini-batch. Where that is
        something else than before, it counts from now on."""
        found, before = self._loss_dim(mode, batch, key[0], asked), mode.losses[key]
        if found.note:
            mode.losses[key] = replace(before, note=found.note)
        if found.is_clear and found.dim != before.dim:
            mode.losses[key] = found
            own = {k: watch for k, watch in mode.loss_numbers.items() if k == key}
            mode.loss_numbers = own  # with other targets it may be something else by now, too
            for watch in own.values():
                watch.forget()
            if not found.is_told:
                asked.warn(messages.put_together_from_now_on("the loss", before.dim == SUM))
        return found

    def _tell_of_labels(self, batches: Batches, check: Callable[[], Finding]) -> None:
        """Warn, by a check, if labels that have come change what micro-batches mean."""
        self._check_once_more(batches, check)

    def _tell_of_numbers(self, batches: Batches, check: Callable[[], Finding]) -> None:
        """Warn, by a check, if changed numbers have changed what micro-batches mean."""
        if not self.is_on_meta():
            self._check_once_more(batches, check)

    def _check_once_more(self, batches: Batches, check: Callable[[], Finding]) -> None:
        """Check what micro-batches mean with a later mini-batch, which may take as long as with the
        first one: so the log says that it is done."""
        title = f"{type(self.model).__name__}: check of a later mini-batch"
        batches.is_unsettled = True
        is_shown = self.options.verbose or wants_log()
        try:
            with timed_into(self.compilations.checks), logged(title, is_shown):
                batches.note(check())
        except Exception as error:
            error.add_note(
                "in fxpipe: while it was checked once more what micro-batches mean (as numbers or "
                "labels have changed that this depends on, or as this mini-batch is one of those "
                "that are checked in any case); with check=False nothing is checked"
            )
            raise
        batches.is_unsettled = False


def _values_in(leaf: Any) -> list[Any]:
    """The values in a leaf of a target: those of an object that has been opened for its tensors."""
    return switches_in(leaf.constants()) if isinstance(leaf, Structure) else [leaf]
