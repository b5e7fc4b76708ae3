"""The automatic cut of a model that has to fit into the memory of its lanes: the pass "partition"
of a compilation where that memory is known.

It cuts the model as :func:`fxpipe.plan` does, so that there is one model of memory: parameters,
gradients, states of the optimizer and buffers; activations of all micro-batches that the schedule
has under way; what operators need while they run; and values that wait to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.ir.graph import GAP, STAGE, stage_nodes
from fxpipe.ir.log import warn
from fxpipe.ir.text import human_bytes
from fxpipe.planning.loss import SavedByLoss
from fxpipe.planning.question import CostedModel, PlanQuestion, copied
from fxpipe.planning.result import Plan
from fxpipe.schedule import ALL_FORWARDS
from passes.chain import ToStages
from passes.partition.automatic import DoesNotFit


@dataclass(frozen=True)
class Fitting:
    """Model graph with costs → the same, with ``meta["stage"]``, so that a training step fits.

    A cut that the user gives is taken as it is, with a warning if it is predicted not to fit.

    Args:
        options: the options of the compilation.
        memory: the bytes that each lane may take; None: no limit.
        context: what is known of the compilation from the model graph to the stage graph.
        ways_out: returns a sentence that says with which other options the model would fit.
        layout: learns which micro-batches the stages keep.
        has_loss: tells whether a training step has a loss.
        loss: returns what the loss will save for its backward; None: nobody knows.

    Raises :class:`DoesNotFit` if no cut fits.
    """

    name: ClassVar[str] = "partition"
    options: Options
    memory: tuple[float | None, ...]
    context: ToStages
    ways_out: Callable[[PlanQuestion], str]
    layout: Layout
    has_loss: Callable[[], bool] = lambda: True
    loss: Callable[[], SavedByLoss | None] = lambda: None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.meta.pop(GAP, None)
        chunks = self.context.traced_chunks or self.context.chunks
        question = question_of(
            *(self.options, self.memory, gm, self.context, chunks),
            has_loss=self.has_loss(),
            loss=self.loss(),
        )
        try:
            plan = question.answer()
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; {self.ways_out(question)}") from None
        if not plan.fits:
            self._warn(plan)
        elif not question.prices.has_steps and self.options.schedule not in ALL_FORWARDS:
            self._warn_of_calls()
        self.layout.modes = plan.checkpoint
        self.layout.segments = plan.checkpoint_segments
        stages = plan.partition
        for node in stage_nodes(gm.graph):
            node.meta[STAGE] = stages[node.name]
        if question.is_automatic and math.isfinite(plan.gap):
            gm.meta[GAP] = plan.gap
        return gm

    def _warn(self, plan: Plan) -> None:
        short = ", ".join(
            f"lane {lane} needs {human_bytes(round(held))} and has {human_bytes(round(limit))}"
            for lane, (held, limit) in enumerate(zip(plan.memory, self.memory, strict=True))
            if limit is not None and held > limit
        )
        warn(
            f"the partition that has been given is predicted not to fit: {short}; give "
            'partition="auto" for a cut that fits, or more memory',
        )

    def _warn_of_calls(self) -> None:
        schedule = self.options.schedule
        named = f'schedule="{schedule}"' if isinstance(schedule, str) else "the schedule"
        warn(
            f"{named} is the order of pipe.step, and there is no loss for a step: a backward that "
            "you run after pipe(x) follows the forwards of all micro-batches, and may so need more "
            'memory than there is, which has not been checked; give loss_fn=, or schedule="gpipe"'
        )


def question_of(
    options: Options,
    memory: Sequence[float | None],
    gm: fx.GraphModule,
    context: ToStages,
    chunks: int,
    *,
    has_loss: bool = True,
    loss: SavedByLoss | None = None,
) -> PlanQuestion:
    """The question which plan there is for a model graph that has costs for ``chunks``
    micro-batches, on the lanes of the options, each with so many bytes of memory (None: no limit).
    ``has_loss``: whether a training step has a loss; ``loss``: what it saves for its backward;
    None: nobody knows.
    """
    lanes = options.lanes
    return PlanQuestion(
        CostedModel(gm, gm, context, options.passes, {chunks: copied(gm)}, has_loss=has_loss),
        options.partition,
        tuple(spec.with_memory(limit) for spec, limit in zip(options.specs, memory, strict=True)),
        options.schedule,
        len(options.devices) if len(options.devices) != len(lanes) else None,
        chunks,
        options.checkpoint,
        options.checkpoint_segments,
        tuple(map(str, lanes)),
        loss,
    )
