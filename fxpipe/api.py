"""The front door: :func:`compile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.compiler.loss import LossFunction, LossWeightFunction
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks import Ranks
from fxpipe.inspect.dump import dump_of
from fxpipe.pipeline import Pipeline
from fxpipe.ranks import RankPipeline
from fxpipe.runtime.compiled_stage import Given, StageBackend
from fxpipe.schedule import Schedule
from fxpipe.trace import CustomTracer
from passes import Chain, default_chain
from passes.cost.choice import Costs
from passes.partition.partition import Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    devices: Sequence[str | torch.device] | DeviceMesh | ProcessGroup | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | None = None,
    partition: Spec = "auto",
    costs: Costs = "auto",
    checkpoint: str = "never",
    checkpoint_segments: int = 1,
    schedule: str | Schedule = "gpipe",
    stages: int | None = None,
    loss_fn: LossFunction | None = None,
    loss_weight: str | LossWeightFunction | None = None,
    in_dims: Any = None,
    out_dims: Any = None,
    deferred_batch_norm: bool = False,
    tracer: str | CustomTracer = "auto",
    passes: Chain | None = None,
    check: bool | str = True,
    stage_backend: Given | None = None,
    dump: str | os.PathLike[str] | None = None,
    verbose: bool = False,
) -> Pipeline:
    """The same model, as a pipeline over several devices.

    Args:
        devices: one for each lane; repeats are allowed, and ``["cpu", "cpu"]`` is two lanes on the
            CPU. None: every visible accelerator, or two CPU lanes where there is none. A lane has
            one stage, or as many as ``schedule`` and ``stages`` say. Or a ``DeviceMesh`` of one
            dimension, or a ``ProcessGroup``: then each of its processes, which all compile the same
            model, is a lane, see :class:`fxpipe.ranks.RankPipeline`.
        example_inputs: arguments of one mini-batch; if these or ``example_kwargs`` are given, the
            pipeline is compiled now, otherwise at its first call.
        chunks: micro-batches per mini-batch. None: as many as ``schedule`` has, if that is one of
            your own, else four for each stage. A batch with fewer rows has fewer, in the order that
            the first ones have. A model whose graph depends on the size of its batch may get fewer,
            all of one size.
        partition: "auto"; or the names of the modules or nodes that begin a stage; or a dict from
            names to stages; or a function that takes the model graph and gives one of these; or an
            :class:`Auto`, which says what is to be even, and under which conditions.
        costs: what the automatic cut goes by: "analytic", "measured" (each node is run and timed on
            the first device), a :class:`Profile` or the path of a saved one, or seconds by name of
            node or module. "auto": measured on accelerators if there are example inputs, else
            analytic.
        checkpoint: "never", "always", or "except_last": which micro-batches keep no activations and
            compute them again in the backward.
        checkpoint_segments: a checkpointed stage is cut in so many segments, each of which is run
            again on its own: at no time are there more activations than those of one of them. The
            inputs of all segments are kept. (Where a schedule puts gradients of parameters off, so
            is what these are computed from.)
        schedule: the order of :meth:`Pipeline.step`: one of :data:`fxpipe.schedule.NAMES`; "auto",
            the best that is found for the stages' costs; or a :class:`fxpipe.schedule.Schedule` for
            as many lanes as there are devices.
        stages: how many, if not as many as the schedule takes: one for each device, or two for
            schedules that give each device several ("interleaved_1f1b", "looped_bfs", "zbv",
            "dualpipe_v").
        loss_fn: for :meth:`Pipeline.step`: ``loss_fn(output, target)`` gives a scalar. None: the
            model returns its loss, as its output, the first of a tuple, or under the name "loss".
        loss_weight: by how much the loss of each micro-batch counts in that of the mini-batch,
            which is the sum of all losses times their weights over the sum of the weights. A
            function that gives a number for a micro-batch: called with its part of the target; if
            there is no ``loss_fn``, with its part of the model's arguments, by their names
            (``lambda labels, **_: (labels != -100).sum()``). :mod:`fxpipe.loss_weight` has such
            functions. Or "rows", for a mean over the rows, or "sum". None: what the check finds,
            the number of rows or a sum.
        in_dims, out_dims: the batch dimension of inputs and outputs, where it cannot be inferred:
            an int or None for all, or nested like the arguments, or the output. An output without
            one (None) is averaged, weighted by the sizes of the micro-batches; where "sum" is said,
            or it is found to be a sum over the rows, it is added up. In ``in_dims``, "list" says
            that a list has one element for each row, as ``{"images": "list", "targets": "list"}``
            for a detection model: it is cut between its elements.
        deferred_batch_norm: update the running statistics of batch norms once for each mini-batch,
            as without a pipeline. Each micro-batch is normalised by its own statistics either way.
        tracer: "auto", "symbolic", "export", or ``(model, args, kwargs) -> fx.GraphModule``.
        passes: the chain of passes to run. None: :func:`fxpipe.default_chain`, to which you can add
            passes of your own: ``fxpipe.default_chain().before("split", Mine())``.
        check: whether what the pipeline means is compared with the model, on a few rows of each
            kind of call: True, what differs is refused; "warn", it is warned of; False, it is
            accepted.
        stage_backend: what compiles each stage, forward and backward: a backend as
            ``torch.compile`` takes it ("inductor", or a function of a graph module and example
            inputs), or a dict of its arguments, ``{"backend": "inductor", "mode":
            "max-autotune"}``. A stage that it cannot compile runs as it is, with a warning. None:
            all stages run as they are.
        dump: a folder, in which ``index.html`` shows what each pass changed: the graph as text, as
            code and, if it is small, drawn, after every pass. None: what ``FXPIPE_DUMP`` in the
            environment says, if anything.
        verbose: whether each compilation logs where its time goes, as a table of its phases, on
            Python's logger "fxpipe" at level INFO (on stderr if logging has not been set up).
            ``FXPIPE_LOGS=compile`` in the environment asks for the same.

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
    if isinstance(model, Pipeline):
        raise TypeError(
            f"compile takes a model, and {type(model.module).__name__} is a pipeline already: give "
            "its model, pipe.module"
        )
    has_example = example_inputs is not None or example_kwargs is not None
    ranks = Ranks.of(devices)
    options = Options.of(
        devices if ranks is None else ranks.devices,  # type: ignore[arg-type]
        schedule,
        stages,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        check=check,
        stage_backend=None if stage_backend is None else StageBackend(stage_backend),
        chunks=chunks,
        partition=partition,
        costs=costs,
        can_measure=has_example,
        checkpoint=checkpoint,
        checkpoint_segments=checkpoint_segments,
        deferred_batch_norm=deferred_batch_norm,
        in_dims=in_dims,
        out_dims=out_dims,
        tracer=tracer,
        passes=default_chain() if passes is None else passes,
        observer=dump_of(dump),
        verbose=verbose,
    )
    pipeline = Pipeline(model, options) if ranks is None else RankPipeline(model, options, ranks)
    if has_example:
        if example_inputs is not None and not isinstance(example_inputs, tuple):
            raise TypeError(
                f"example_inputs is the tuple of the model's arguments, got a "
                f"{type(example_inputs).__name__}; write example_inputs=(x,) for one"
            )
        pipeline.prepare(*(example_inputs or ()), **(example_kwargs or {}))
    return pipeline
