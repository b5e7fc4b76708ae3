"""The explanation of a pipeline in sentences: what the compiler has found and decided, what limits
the speed, and which calls would help.

::

    compilation ─┬─ the batch, the trace, what is kept whole, the cut      what there is
                 ├─ the planner, asked again with it as it is              what limits the speed
                 └─ the planner, asked again with other options            what would help
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fxpipe.compiler.compilations import Compilations
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.compiler.replanned import Replanned
from fxpipe.inspect.against import (
    OF_THE_MODEL,
    UNCOUNTED,
    against,
    factor,
    is_off,
    microbatches_of,
)
from fxpipe.inspect.calls import PrintedCalls
from fxpipe.inspect.report import UNEVEN, advice
from fxpipe.inspect.stage import Stage
from fxpipe.inspect.step_work import StepWork
from fxpipe.inspect.suggestions import Suggesting, Suggestion
from fxpipe.ir.cost import Cost
from fxpipe.ir.errors import AnotherStrategy
from fxpipe.ir.graph import COST, GAP
from fxpipe.ir.tensors import tensors_of
from fxpipe.ir.text import human_bytes, human_time, optimality
from fxpipe.meaning.messages import split
from fxpipe.meaning.said import INFER, named_inputs
from fxpipe.meaning.shared_draws import inputs_behind
from fxpipe.planning.loss import NO_TARGET
from fxpipe.planning.result import Plan
from fxpipe.runtime.microbatch import LISTED, SUM, WEIGHTED, Dim
from fxpipe.schedule import ALL_FORWARDS, Timeline
from fxpipe.schedule.simulator import OPTIMIZER
from passes.common.modes import OFFLOAD, is_never
from passes.common.segments import in_words
from passes.partition.pieces import heaviest, kept_whole

WIDTH = 100  # of an explanation that is printed
_MEASURES_ALONE = "fxpipe.tune(..., measure=3) measures the model alone, too"
COSTLY = 0.02  # the part of a step's time that uneven stages may cost before that is said
SEEN = 0.005  # the part of a step's time from which on it is said what links cost
_LOSSES: dict[Dim, str] = {
    None: "loss_fn is taken for a mean over the rows: micro-batches' losses are averaged by rows.",
    SUM: "loss_fn is taken for a sum over the rows: the losses of micro-batches are added up.",
    WEIGHTED: "The losses of micro-batches are averaged with the weights that loss_weight gives.",
}
SHOWN = 5  # the most pieces that are kept whole, and inputs that are shared, that are named
REPEATED = 0.05  # what is computed for each micro-batch anew is said if it is more of the time


@dataclass(frozen=True)
class Explanation:
    """What a pipeline does and why, what limits its speed, and what would help. ``print`` shows it
    as text.

    Attributes:
        title: what is explained.
        paragraphs: sentences by their headings.
        suggestions: calls of :func:`fxpipe.compile` that are predicted to make a step, or a call
            without one, faster, the most helpful first.
    """

    title: str
    paragraphs: Mapping[str, Sequence[str]]
    suggestions: Sequence[Suggestion] = ()

    def __str__(self) -> str:
        lines = [self.title]
        for heading, sentences in self.paragraphs.items():
            lines += ["", heading]
            lines += [line for sentence in sentences for line in _wrapped(sentence)]
        return "\n".join(lines)

    __repr__ = __str__


def _wrapped(sentence: str) -> Iterable[str]:
    """The lines of a sentence; code, which begins with spaces, is left as it is."""
    for line in sentence.splitlines():
        if line.startswith(" "):
            yield line
        else:
            yield from textwrap.wrap(
                line, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False
            )


def not_compiled(model: nn.Module, refused: str) -> Explanation:
    """What there is to say before a first call has been compiled, where no example inputs were
    given. ``refused``: the error that a call has ended with; "" if there was none."""
    why = "there has been no call and no example"
    said = [
        f"{type(model).__name__} is not compiled yet, as "
        f"{'the last call could not be compiled' if refused else why}: "
        "where its batch is, how it can be traced and where it is cut is not known.",
        *([f"That call ended with {refused}"] if refused else []),
        "Call this, with inputs like those of a call, and then explain() again:",
        "    pipe.prepare(x)",
    ]
    return Explanation(f"{type(model).__name__}, not compiled", {"What is known": said})


@dataclass(frozen=True)
class Explaining:
    """Makes the explanation of a compiled model.

    Args:
        model: the model.
        options, layout: those of the compilation.
        mode, chunks: what has been compiled for the last call, and its number of micro-batches.
        stages: the stages of it.
        measured: a training step, or a call without one, as it was measured; None if none was.
        measured_sizes: the sizes of the tensors among its inputs; empty if they are not known.
        replayed: the same, as it is predicted from the measured times of the stages.
        has_stepped: whether there has been a training step by the schedule.
        compilations: those that there have been of the model, and the checks of later mini-batches.
        aside: what is to be said first, if the last call was an evaluation between training steps.
        cores: how many cores lanes on the CPU share; None: nobody knows, as ranks may be on several
            machines.
    """

    model: nn.Module
    options: Options
    layout: Layout
    mode: Mode
    chunks: int
    stages: Sequence[Stage]
    measured: Timeline | None = None
    measured_sizes: Sequence[tuple[int, ...]] = ()
    replayed: Timeline | None = None
    has_stepped: bool = False
    compilations: Compilations | None = None
    cores: int | None = None
    aside: str = ""

    def __call__(self) -> Explanation:
        """The explanation. The planner is asked several times."""
        name, stages = type(self.model).__name__, len(self.stages)
        title = f"{name} on {_counted(stages, 'stage')}, {_counted(self.chunks, 'micro-batch')}"
        said = {
            "Where the batch is": [*filter(None, [self.aside]), *self._batch()],
            "How it was traced": self._trace(),
            "What is kept whole": self._whole(),
        }
        compiled = Replanned(self.options, self.layout, self.mode, self.chunks)
        now, why = _plan_of(compiled.as_it_is)
        placement = [stage.lane for stage in self.stages]
        work = StepWork.of(None if now is None else now.timeline, self.mode.costs, placement)
        said["Where it is cut"] = self._cut(work)
        if self.compilations:
            said["What compiling has taken"] = [_compiling(self.compilations)]
        if now is None:
            said["What limits the speed"] = [
                f"No {self._run} can be predicted: {why}.",
                *self._measured(None),
                *self._advice(work),
            ]
            return Explanation(title, said)
        found = Suggesting(compiled, now, self.options.call).found
        said["What limits the speed"] = self._speed(compiled, now, work)
        said["What it needs of memory"] = self._memory(compiled, now)
        said["What would help"] = self._help(found, compiled, now)
        return Explanation(f"{title}, {now.schedule.name}", said, found)

    @property
    def _run(self) -> str:
        """What is predicted, and made faster: a training step, or a call without one."""
        return "step" if self.options.training else "call"

    def _repeated(self, dims: Sequence[Dim]) -> float:
        """The part of the model's time that is for what depends on shared inputs alone."""
        seconds = {True: 0.0, False: 0.0}
        for node, behind in inputs_behind(self.mode.model_graph.graph, len(dims)):
            is_repeated = bool(behind) and all(dims[place] is None for place in behind)
            seconds[is_repeated] += node.meta.get(COST, Cost()).seconds
        return seconds[True] / (sum(seconds.values()) or 1.0)

    def _batch(self) -> list[str]:
        """Where the batch is, and how that is known."""
        mode, options = self.mode, self.options
        sample = mode.example
        inputs = named_inputs(self.model, *sample.repeated(), options.in_dims)
        dims = [dim if isinstance(dim, int) else None for dim in sample.dims]
        rows = mode.rows or sample.batch
        if LISTED in sample.dims:
            pairs = zip(inputs, sample.dims, strict=True)
            lists = {each.name.split("[")[0] for each, dim in pairs if dim == LISTED}
            where = f"{', '.join(sorted(lists))} along the list"
        else:
            where = split(inputs, dims)
        if not where or rows is None:
            return ["No input has a batch dimension, so that there is one micro-batch."]
        sentences = [
            f"A mini-batch of {_counted(rows, 'row')} is cut into "
            f"{_counted(self.chunks, 'micro-batch')}: {where}."
        ]
        shared = [each.name for each, dim in zip(inputs, sample.dims, strict=True) if dim is None]
        if shared:
            more = f" and {len(shared) - SHOWN} more" * (len(shared) > SHOWN)
            sentences.append(f"All of them share {', '.join(shared[:SHOWN])}{more}.")
            again = self._repeated(sample.dims)
            if again > REPEATED:
                sentences.append(
                    f"What depends on {'that' if len(shared) == 1 else 'those'} alone takes "
                    f"{again:.0%} of the model's time, and is computed for each micro-batch anew: "
                    "fewer chunks repeat it less often, or compute it outside of the model."
                )
        cut = [each for each, dim in zip(inputs, sample.dims, strict=True) if dim is not None]
        if all(each.said is not INFER for each in cut):
            sentences.append("That is so because in_dims says it.")
        elif mode.is_checked:
            sentences += self._compared()
        else:
            sentences.append(
                "That is the likeliest reading of the shapes, and has not been checked: give "
                "in_dims= to say which dimension is the batch."
            )
        if options.check is not True:
            sentences.append(
                f"With check={options.check!r} a difference from the model is "
                f"{'only warned of' if options.check else 'accepted'}; check=True refuses it."
            )
        known = [] if options.loss_fn is None else mode.losses_of_parts
        found = [each.dim for each in known if each.is_decided]
        losses = [_LOSSES[dim] for dim in dict.fromkeys(found)]
        return [*sentences, *losses, *(_sentence(note) for note in mode.all_notes)]

    def _compared(self) -> Iterator[str]:
        """What the check has found when it compared the model with itself."""
        mode = self.mode
        differing = " and ".join(sorted(mode.differing))
        ran = "the model was run on a few rows at once and in parts"
        if mode.outputs_checked.keys() <= mode.differing:
            yield (
                f"That is the likeliest reading of the shapes: {ran}, and what the parts give is "
                f"not the whole's {differing}, as said below."
            )
            return
        but = f", but for {differing}, as said below" if differing else ""
        yield f"The check has found it out: {ran}, and the parts put together are the whole{but}."

    def _trace(self) -> list[str]:
        """What has traced the model, and what came before it in vain."""
        traced = self.mode.traced
        by = {
            "symbolic": "torch.fx has traced the model symbolically: its layers are nodes, and all "
            "sizes may vary.",
            "export": "torch.export has traced the model, into operators.",
            "custom": "The tracer that you gave has traced the model.",
        }
        sentences = [by.get(traced.front_end, f"{traced.front_end} has traced the model.")]
        if traced.tried:
            if traced.front_end == "export" and _has_only_stopped(traced.tried):
                sentences.append(
                    "That is nothing to mend: symbolic tracing, which was tried before that, has "
                    "neither sizes nor values of inputs to put into calls and conditions, and so "
                    "torch.export has traced the model. What differs is that nodes are operators, "
                    "and no layers, and that the graph may be for some sizes only, as said below. "
                    "Symbolic tracing ended here:"
                )
            else:
                sentences.append("What was tried before that, and why it was not taken:")
            sentences += [f"    {tried}" for tried in traced.tried]
        elif traced.front_end == "export" and self.options.tracer == "export":
            sentences.append('That is so because of tracer="export".')
        guards = self.mode.guards
        calls = ", ".join(filter(None, (str(each) for each in guards if each is not guards.state)))
        sentences.append(
            f"The graph is for {calls}; another call is compiled anew. print(pipe.guards) has the "
            "attributes of the model that it depends on, too."
        )
        fixed = [line for guard in guards.shapes for line in guard.constants]
        if fixed:
            sentences += [_sentence(line) for line in fixed]
            sentences.append(
                "A call with another size there is compiled by itself: where sizes vary, pad to "
                "few of them, multiples of 64 say."
            )
        if self.mode.why_one_size:
            sentences.append("It is for this batch size only, because for any size there was none:")
            sentences += [f"    {line}" for line in self.mode.why_one_size.splitlines()]
        if self.mode.compiled is not None:
            sentences += [_sentence(line) for line in self.mode.compiled.lines]
        return sentences

    def _whole(self) -> list[str]:
        """The pieces that a cut cannot divide for a reason that lies in the model, and the heaviest
        one, if it makes stages uneven."""
        graph = self.mode.model_graph.graph
        whole, most = kept_whole(graph), heaviest(graph)
        is_known = any(most.nodes == piece.nodes for piece in whole)
        if most.share * len(self.stages) >= UNEVEN and len(self.stages) > 1 and not is_known:
            whole.append(most)
        found = sorted(whole, key=lambda piece: -piece.share)
        sentences = [_sentence(str(piece)) for piece in found[:SHOWN]]
        if len(found) > SHOWN:
            sentences.append(f"There are {len(found) - SHOWN} more, with less of the time.")
        return sentences or ["Nothing beside single layers and operators, none of them too large."]

    def _cut(self, work: StepWork) -> list[str]:
        """What is in each stage, and how good the cut is."""
        total = sum(work.stages) or 1.0
        of_loss = f", of which the loss takes {work.loss / total:.0%}" if work.loss else ""
        sentences = [
            f"Stage {stage.index} on {stage.device}, {seconds / total:.0%} of the time"
            f"{of_loss * (stage.index == len(self.stages) - 1)}: {stage.contains}."
            for stage, seconds in zip(self.stages, work.stages, strict=True)
        ]
        gap = self.mode.model_graph.meta.get(GAP)
        if gap is not None:
            is_limited = any(limit is not None for limit in self.options.memory or ())
            sentences.append(_sentence(optimality(gap, is_limited=is_limited)))
        elif any(name == "partition" for name, _ in self.options.call.arguments):
            sentences.append("The cut is yours, by partition=.")
        if not is_never(self.layout.modes):
            kept = in_words(self.layout.modes, self.layout.segments)
            what = "recompute, or have on the host" if OFFLOAD in kept else "recompute"
            sentences.append(f"What stages {what} (checkpoint): {kept}.")
        return sentences

    def _speed(self, compiled: Replanned, now: Plan, work: StepWork) -> list[str]:
        """How long a step or a call takes, and what of that is due to what."""
        step, lanes = now.timeline, len(self.options.lanes)
        whole = step.makespan
        if not whole:
            return ["No time is known for any node."]
        busy = list(step.busy)
        slowest, mean = max(range(lanes), key=busy.__getitem__), sum(busy) / lanes
        training, run = self.options.training, self._run
        sentences = [
            f"A {'training step' if training else 'call'} takes {human_time(whole)}, by "
            f"prediction; one after the other, the stages would take {human_time(sum(busy))}. So "
            f"{_counted(lanes, 'lane')} {'are' if lanes > 1 else 'is'} {sum(busy) / whole:.2f} "
            "times as fast as one that runs the same micro-batches."
        ]
        here = max(whole, self._least_here(busy))
        if here > whole:
            shared = _counted(self.cores or 1, "core")
            sentences.append(
                f"But here {_counted(lanes, 'lane')} share {shared}, on which a {run} takes no "
                f"less than {human_time(here)}."
            )
        elif self._is_shared:
            sentences.append(
                f"Lanes on one {self._place} share it: this prediction is for lanes that each have "
                f"a {self._place} of their own."
            )
        sentences += self._without_a_pipeline(compiled, here)
        sentences += self._without_the_loss
        most, average = human_time(busy[slowest]), human_time(mean)
        uneven = busy[slowest] - mean
        if most == average:
            sentences.append(f"Each lane is predicted to work {most}: the stages are even.")
        else:
            sentences.append(
                f"Lane {slowest} ({self._on(slowest)}) is predicted to work most, {most}, and the "
                f"mean of all is {average}. "
                + (
                    f"The stages are uneven, and that costs {uneven / whole:.0%} of the {run}."
                    if uneven > COSTLY * whole
                    else "So the stages are even."
                )
            )
        waits = whole - busy[slowest]
        sentences.append(
            f"The bubble: lane {slowest} waits {waits / whole:.0%} of the {run}, for its first "
            "micro-batch and after its last."
        )
        updating = sum(s.seconds for s in step.of_lane(slowest) if s.name == OPTIMIZER)
        if updating:
            sentences.append(
                f"The optimizer's step is predicted to take {human_time(updating)} of that lane, "
                f"{updating / whole:.0%} of the {run}."
            )
        if len(set(self.options.names)) > 1:
            free, why = _plan_of(compiled.without_links)
            if free is None:
                sentences.append(f"What links cost cannot be predicted: {why}.")
            elif whole - free.seconds > SEEN * whole:
                sentences.append(f"Links cost {1 - free.seconds / whole:.0%} of the {run}.")
        if not is_never(self.layout.modes):
            kept, why = _plan_of(compiled.without_checkpoints)
            sentences.append(
                f"What it costs to recompute activations cannot be predicted: {why}."
                if kept is None
                else f"To recompute activations costs {1 - kept.seconds / whole:.0%} of the {run}."
            )
        sentences += self._advice(work)
        sentences += self._measured(now)
        if self.measured is None:
            has_loss = self._calls.has_loss or not training
            needs = "" if has_loss else ", once it is compiled with loss_fn="
            sentences.append(
                f"The times of nodes {self._source}; pipe.measure(...) measures {run}s{needs}:"
            )
            sentences.append(f"    print({self._calls.of('measure')})")
        return sentences

    @property
    def _is_on_cpu(self) -> bool:
        """Whether every lane of the pipeline is on the CPU, so that lanes share its cores."""
        return all(lane.type == "cpu" for lane in self.options.lanes)

    @property
    def _is_shared(self) -> bool:
        """Whether lanes share a device, or may share cores."""
        lanes = len(self.options.lanes)
        has_cores = self._is_on_cpu and lanes <= (self.cores or 0)
        return len(set(self.options.names)) < lanes and not has_cores

    @property
    def _place(self) -> str:
        """What each lane would have to itself, if they shared nothing."""
        return "core" if self._is_on_cpu else "device"

    def _least_here(self, busy: Sequence[float]) -> float:
        """The least seconds that lanes which work for so long take on the cores of this machine; 0
        for lanes that are not all on the CPU."""
        return sum(busy) / self.cores if self._is_on_cpu and self.cores else 0.0

    def _without_a_pipeline(self, compiled: Replanned, pipeline: float) -> list[str]:
        """How long the model takes by itself, beside the seconds that the pipeline takes."""
        if not self.options.knows_other_sizes:
            if not (self._is_on_cpu and self.options.training):
                return []
            return [
                "Its costs say nothing of a mini-batch in one piece, so that it is not known from "
                f"them how long the model takes without a pipeline: {_MEASURES_ALONE}."
            ]
        alone, _ = _plan_of(compiled.alone)
        if alone is None:
            return []
        held, limit = alone.memory[0], compiled.memory[0]
        on = "one core" if self.options.lanes[0].type == "cpu" else str(self.options.lanes[0])
        took = human_time(alone.seconds)
        without = f"Without a pipeline, on {on} and with the mini-batch in one piece,"
        said = f"{without} a {self._run} would take {took}"
        if limit is not None and held > limit:
            missing = f"{human_bytes(round(held))} in place of {human_bytes(round(limit))}"
            return [f"{said}, and would need more memory than there is, {missing}."]
        times = alone.seconds / pipeline
        better = (
            f": the pipeline is {times:.2f} times as fast" if times > 1 else ", which is faster"
        )
        is_slower = self.measured is not None and self.measured.makespan > alone.seconds
        if times > 1 and self._is_measured_as_it_is and is_slower:
            better += ", by prediction; but its measured step, below, takes longer than that"
        sentences = [f"{said}{better}."]
        if self._is_on_cpu and self.cores and self.options.training:
            sentences.append(
                "PyTorch shares a large operator among the cores by itself: "
                + _MEASURES_ALONE
                + "."
            )
        return sentences

    def _measured(self, now: Plan | None) -> list[str]:
        """How long a step has taken, if one has been measured, and why that is not as predicted."""
        if self.measured is None:
            return []
        took = f"Measured, by pipe.measure, it was {human_time(self.measured.makespan)}"
        if microbatches_of(self.measured) != self.chunks:
            of = _counted(microbatches_of(self.measured), "micro-batch")
            return [f"{took}, for a mini-batch of {of}."]
        known = self._sizes_of_example
        if self.measured_sizes and known and sorted(known) != sorted(self.measured_sizes):
            return [
                f"{took}, for inputs of {_of_sizes(self.measured_sizes)}. Predictions and the cut "
                f"are for {_of_sizes(known)}, those of the call that the model was first compiled "
                "for, so that they are not compared. If most mini-batches are as large as the "
                "measured one, compile with one of them as example_inputs=."
            ]
        if now is None or self.replayed is None:
            return [f"{took}."]
        names = [str(device) for device in self.options.lanes]
        found = list(
            against(
                now.timeline, self.measured, self.replayed, names, self._run, self._uncounted_loss
            )
        )
        if self._is_measured_as_it_is and is_off(now.timeline, self.measured):
            is_shorter = factor(now.timeline, self.measured) < 1
            if self.options.costs == "measured" and is_shorter:
                found.append(
                    "The times of nodes were measured, each by itself, and were longer then, as "
                    "where other processes take the cores: compile again to measure them again."
                )
            elif self.options.costs == "measured":
                found.append(
                    "The times of nodes were measured, each by itself: so it is not they that are "
                    "off, but what is around them, such as other programs that take the cores, or "
                    "lanes that slow each other. Lanes are threads, and Python runs one at a time "
                    "(its global interpreter lock, GIL): nodes that take only some microseconds "
                    "each wait for that. Larger micro-batches make nodes longer, and ranks (docs: "
                    "Ranks) give each stage an interpreter of its own."
                )
            else:
                found += [
                    f"The times of nodes {self._source}, and they are off. With "
                    'costs="measured" each node is measured by itself, which also tells slow nodes '
                    "from lanes that slow each other:",
                    f"    pipe = {self.options.call.with_options(costs='measured')}",
                ]
        return found

    @property
    def _sizes_of_example(self) -> list[tuple[int, ...]] | None:
        """The sizes of the inputs that predictions are for; None where rows are elements of lists,
        as there are other tensors then."""
        example = self.mode.example
        if self.mode.rows is not None:
            return None
        pairs = zip(tensors_of(example.inputs), example.dims, strict=True)
        return [
            tuple(example.batch or n if place == dim else n for place, n in enumerate(tensor.shape))
            for tensor, dim in pairs
        ]

    @property
    def _is_measured_as_it_is(self) -> bool:
        """Whether a step with this number of micro-batches has been measured."""
        return self.measured is not None and microbatches_of(self.measured) == self.chunks

    @property
    def _without_the_loss(self) -> list[str]:
        """That predictions leave the loss out, where there is one and it could not be counted."""
        why = self.mode.expected_loss
        if self.options.loss_fn is None or not self.options.training or not isinstance(why, str):
            return []
        if self.mode.seen_loss is not None:
            return [
                "The cut does not count the loss, which these predictions do: no target was known "
                "when the model was cut. example_target= gives one."
            ]
        return [f"Time and memory of the loss are in none of these predictions: {why}."]

    @property
    def _uncounted_loss(self) -> str:
        """Why the time of the loss is not predicted, where it is not."""
        if self.options.loss_fn is None:
            return OF_THE_MODEL
        why = self.mode.expected_loss
        if isinstance(why, str) and why != NO_TARGET:
            return f"of which the prediction knows nothing: {why}"
        return UNCOUNTED

    @property
    def _source(self) -> str:
        """Where the times of nodes come from."""
        if self.options.costs == "measured":
            return "were measured"
        return "are those of costs=" if self.options.has_given_costs else "are estimates"

    @property
    def _other_sizes(self) -> str:
        """Why other numbers of micro-batches have not been tried."""
        return (
            f"Other numbers of micro-batches were not tried, as the times of nodes {self._source}, "
            "for micro-batches of this size, and do not say what others take."
        )

    @property
    def _calls(self) -> PrintedCalls:
        return PrintedCalls(self.model, self.options, self.mode)

    def _advice(self, work: StepWork) -> list[str]:
        """Which part of the model makes the cut uneven, if it is."""
        return [_sentence(line) for line in advice(self.mode.model_graph, work)]

    def _on(self, lane: int) -> str:
        """The stages of a lane, in words."""
        own = [str(stage.index) for stage in self.stages if stage.lane == lane]
        return f"stage{'s' * (len(own) > 1)} {', '.join(own)}"

    def _memory(self, compiled: Replanned, now: Plan) -> list[str]:
        """What each lane holds, and has."""
        sentences = []
        for lane, (held, limit) in enumerate(zip(now.memory, compiled.memory, strict=True)):
            of = "" if limit is None else f" of {human_bytes(round(limit))}"
            sentences.append(
                f"Lane {lane} ({self.options.lanes[lane]}) holds {human_bytes(round(held))}{of} at "
                "most, by prediction."
            )
        if self.options.training and self.options.schedule not in ALL_FORWARDS:
            sentences.append(
                "That is in pipe.step: a backward that you run after pipe(x) follows the forwards "
                'of all micro-batches, which keep all of their activations then, as with "gpipe".'
            )
        if self._without_the_loss and self.mode.saved_by_loss is None:
            sentences.append("What the loss saves for its backward is not counted there either.")
        if all(limit is None for limit in compiled.memory):
            sentences.append('No limit is known: memory= says one, such as memory="20GiB".')
        return sentences

    def _help(self, found: Sequence[Suggestion], compiled: Replanned, now: Plan) -> list[str]:
        """The suggestions, each with its call."""
        left_out = [] if compiled.options.knows_other_sizes else [self._other_sizes]
        tune = f"    print({self._calls.tune(measure=3)})"
        if not found:
            tried = [
                "the cut",
                *["checkpoints"] * self.options.training,
                *["other numbers of micro-batches"] * compiled.options.knows_other_sizes,
                *["other schedules"] * self.options.training,
            ]
            none = (
                f"Nothing that was tried ({', '.join(tried)}) is predicted to save 5 % of a "
                f"{self._run} or more."
            )
            more = "This tries more, and measures three of them:"
            return [none, *left_out, *([more, tune] if self.options.training else [])]
        sentences = []
        if self.measured is not None and self._is_measured_as_it_is:
            times = factor(now.timeline, self.measured)
            sentences.append(
                "These are predictions from the times of nodes, as the first prediction above is; "
                f"the measured times of the stages, {times:.3g} times as long, are not in them, as "
                "they say nothing of another cut or of other micro-batches."
            )
        if self._is_shared:
            sentences.append(
                f"These, too, are predictions for lanes that each have a {self._place} of their "
                "own."
            )
        for each in found:
            sentences += [f"{each}:", f"    pipe = {each.call}"]
            if each.caution and f"{each.caution}." not in sentences:
                sentences.append(f"{each.caution}.")
        if left_out:
            measures = f"{left_out[0]} This tries them, and measures three:"
            sentences += [measures, tune] if self.options.training else left_out
        elif self._is_shared and self.options.training:
            sentences += ["What holds for lanes that share one is measured by this:", tune]
        if not self.has_stepped and any("schedule" in each.options for each in found):
            sentences.append(
                f"A schedule acts in {self._calls.of('step')}"
                + ("" if self._calls.has_loss else ", which needs loss_fn=")
                + "; a call of pipe runs all forwards first, whatever the schedule."
            )
        return sentences


def _plan_of(ask: Callable[[], Plan]) -> tuple[Plan | None, str]:
    """What the planner answers to a question; or None, and why it has no answer."""
    try:
        return ask(), ""
    except (ValueError, AnotherStrategy) as error:  # no such schedule can run, or no cut is valid
        return None, str(error)


def _compiling(compilations: Compilations) -> str:
    """How often the model was compiled, and how long that took, and checks after it."""
    count, seconds = len(compilations), sum(each.seconds for each in compilations)
    taken = f"{'have' if count > 1 else 'has'} taken {human_time(seconds)}{' in all' * (count > 1)}"
    found = [f"{_counted(count, 'compilation')} {taken}", *compilations.later]
    return f"{'; '.join(found)}. print(pipe.compilations) says for which calls and why."


def _counted(count: int, what: str) -> str:
    """``2, "micro-batch"`` → ``2 micro-batches``."""
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("h") else "s")


def _has_only_stopped(tried: Sequence[str]) -> bool:
    """Whether symbolic tracing, and nothing else, was tried in vain, and ended by an exception in
    the model's code: its graph was not found to be wrong."""
    return len(tried) == 1 and re.match(r"symbolic: \w+: ", tried[0]) is not None


def _sentence(text: str) -> str:
    """Text as a sentence, with a capital letter and a full stop."""
    capital = text[:1].upper() + text[1:]
    return capital if capital.endswith((".", ":", ")")) else f"{capital}."


def _of_sizes(sizes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(size)) for size in sizes)
