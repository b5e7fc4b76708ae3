"""Deciding: what a user leaves open, the schedule or the number of micro-batches, is chosen by
prediction ahead of the first compilation; from then on it is as if the user had said it.

::

    schedule="auto"     all named schedules, and an order of its own  ┐
    chunks="auto"       all numbers that cut the batch evenly         ├─ the fastest that fits
    stages=None         as many as each schedule takes                ┘     (fxpipe.planning.search)

The model is traced for this with fake tensors, and the pipeline is then compiled with the cut of
the plan that has been chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.ir.errors import AnotherStrategy, is_itself, is_the_models
from fxpipe.ir.graph import GAP, STAGE, stage_nodes
from fxpipe.planning.loss import ExpectedLoss, SavedByLoss, has_loss
from fxpipe.planning.question import CostSettings, costed
from fxpipe.planning.search import Choice, Left, SettingSearch
from passes import Pass


def decided(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Options,
    memory: Sequence[float | None],
    target: Any = None,
) -> Choice | str:
    """What is chosen for a model and a mini-batch; or, where nothing can be predicted, why.

    Args:
        memory: the bytes that each lane may take; None: no limit.
        target: a target like those of the calls to come; None: not known.

    Raises :class:`DoesNotFit` if nothing fits, and :class:`PartitionError` if the model cannot be
    cut as the user asks.
    """
    specs = tuple(s.with_memory(m) for s, m in zip(options.specs, memory, strict=True))
    # To choose by measured costs, all nodes would have to be measured for each number of
    # micro-batches. The cut has measured costs, once that number is known.
    is_measured = isinstance(options.costs, str) and options.costs == "measured"
    settings = CostSettings(
        "analytic" if is_measured else options.costs,
        specs[0],
        options.optimizer_states,
        options.training,
        options.optimizer_update,
    )
    try:
        prices, rows = costed(
            model,
            inputs,
            settings,
            in_dims=options.in_dims,
            tracer=options.tracer,
            chunks=options.chunks,
            chain=options.passes,
        )
    except Exception as error:  # tracing runs the model's code, which may raise anything
        is_said = isinstance(error, AnotherStrategy | ValueError) and not is_itself(error)
        if is_said or is_the_models(error):
            return str(error)
        raise
    returned = prices.sketched.graph, prices.rebuild
    prices = replace(prices, has_loss=has_loss(options.loss_fn, *returned, rows))
    names = tuple(map(str, options.lanes))
    loss: SavedByLoss | str | None = None
    if options.loss_fn is not None and target is not None:
        expected = ExpectedLoss(options.loss_fn, target, prices.rebuild)
        loss = expected.saved(prices.sketched.graph)
    loss = loss if isinstance(loss, SavedByLoss) else None
    search = SettingSearch(prices, options.partition, specs, options.checkpoint, names, loss)
    left = Left(
        str(options.schedule),
        options.chunks,
        None if options.leaves_stages_open else len(options.devices),
        options.checkpoint_segments,
        options.has_given_costs,
    )
    trials = search.of_open(left, rows)
    if not trials[0].plan:
        return search.why_none(trials, rows)
    return replace(Choice.of(trials, rows), is_estimated=is_measured)


@dataclass(frozen=True)
class AsChosen:
    """Model graph → the same, with ``meta["stage"]``, cut as the plan that has been chosen. A graph
    of other nodes is cut by another pass.

    Args:
        choice: what has been chosen.
        layout: learns which micro-batches the stages keep.
        otherwise: the pass that cuts other graphs.
        is_searched: whether the cut has been searched for, and not been given by the user.
    """

    name: ClassVar[str] = "partition"
    choice: Choice
    layout: Layout
    otherwise: Pass
    is_searched: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages: Mapping[str, int] = self.choice.partition
        work = list(stage_nodes(gm.graph))
        if {node.name for node in work} != stages.keys():
            return self.otherwise(gm)
        for node in work:
            node.meta[STAGE] = stages[node.name]
        if self.is_searched and math.isfinite(self.choice.gap):
            gm.meta[GAP] = self.choice.gap
        self.layout.modes = self.choice.checkpoint
        self.layout.segments = self.choice.checkpoint_segments
        return gm
