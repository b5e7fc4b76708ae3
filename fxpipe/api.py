"""The front door: :func:`compile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.compiler.loss import LossFunction, LossWeightFunction
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks.tensors import parameters_in_parts
from fxpipe.compiler.ranks.world import Ranks
from fxpipe.compiler.written import WrittenCall
from fxpipe.inspect.dump import dump_of
from fxpipe.ir._torch import sharded_modules
from fxpipe.ir.options import options_checked
from fxpipe.ir.text import kind
from fxpipe.pipeline import Pipeline
from fxpipe.planning.limits import Memory
from fxpipe.ranks import RankPipeline
from fxpipe.runtime.compiled.stage import Given, StageBackend
from fxpipe.schedule import Schedule
from fxpipe.trace import CustomTracer
from passes import Chain, default_chain
from passes.common.modes import Modes, modes_of
from passes.common.segments import Segments, segments_of
from passes.cost.choice import Costs
from passes.partition.partition import Spec, within

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


CACHE = "FXPIPE_CACHE"
"""The environment variable that names the folder of the cache."""


@options_checked()
def compile(
    model: nn.Module,
    devices: Sequence[str | torch.device] | DeviceMesh | ProcessGroup | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | str | None = None,
    partition: Spec = "auto",
    boundaries: Sequence[str] | None = None,
    costs: Costs = "auto",
    checkpoint: Modes = "never",
    checkpoint_segments: Segments = None,
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
    dynamic: bool | None = None,
    memory: Memory = None,
    optimizer: str | float | Optimizer | None = None,
    example_target: Any = None,
    training: bool = True,
    dump: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Compile a model to a pipeline over several devices, which computes what the model computes.

    ::

        pipe = fxpipe.compile(model, ["cuda:0", "cuda:1"], chunks=8, loss_fn=F.cross_entropy)
        output = pipe(x)                                   # like the model; or a training step:
        loss = pipe.step(x, target=y, optimizer=optimizer, zero_grad=True)

    Args:
        model: any module. The pipeline shares its parameters.
        devices: one for each lane; ``["cpu", "cpu"]`` is two lanes on the CPU. None: every visible
            accelerator. For a ``DeviceMesh`` or a ``ProcessGroup`` see
            :class:`fxpipe.ranks.RankPipeline`.
        example_inputs, example_kwargs: the arguments of one mini-batch, as a tuple and a dict:
            compile now. None: compile at the first call.
        chunks: the number of micro-batches in a mini-batch. None: four for each stage. "auto": the
            number with which a step is predicted to take least time.
        partition: where to cut: "auto"; the names of the modules or nodes that begin a stage; a
            dict from names to stages; a function of the model graph; or an :class:`Auto`.
        boundaries: modules at whose begin and end an automatic cut may be: ``["model.layers.*"]``.
        costs: times of nodes, for the cut: "analytic", "measured", a :class:`Profile`, its path, or
            seconds by name. "auto": measured on accelerators if there are example inputs.
        checkpoint: which micro-batches recompute their activations: "never", "always",
            "except_last"; "selective": all, but for products; "offload": activations wait in the
            host's memory; a part of each stage ("always 1/2", "offload 1/2"); a list of these for
            each stage; or "auto": what fits, and is fastest.
        checkpoint_segments: a checkpointed stage is recomputed in so many parts, one at a time; a
            list with one number for each stage; or "auto": more than one where nothing fits
            otherwise. None: "auto" with ``checkpoint="auto"``, else 1.
        schedule: the order of a training step: a name in :data:`fxpipe.schedule.NAMES`, a
            :class:`Schedule`, or "auto": the one with which a step is predicted to take least time.
        stages: the number of stages. None: as many as the schedule takes.
        loss_fn: ``loss_fn(output, target)`` returns a scalar. None: the model returns its loss.
        loss_weight: what a micro-batch counts in the loss of the mini-batch: a function, such as
            those of :mod:`fxpipe.loss_weight`; "rows"; or "sum". None: found out by the check.
        in_dims, out_dims: batch dimensions that cannot be inferred: an int or None for all values,
            or nested like the values; "list": a list of rows; "sum": an output that is a sum.
        deferred_batch_norm: update running statistics once for each mini-batch.
        tracer: "auto", "symbolic", "export", or ``(model, args, kwargs) -> fx.GraphModule``.
        passes: the chain of passes. None: :func:`fxpipe.default_chain`.
        check: compare what micro-batches compute with the model, whenever a kind of call is
            compiled. True: a call that differs is refused. "warn": it runs. False: no check.
        stage_backend: what compiles each stage, as ``torch.compile`` takes it: "inductor", a
            function, or a dict of arguments. None: stages run as they are.
        dynamic: one program for other lengths, heights and widths, too. None: from the second size
            on. (The batch size may always vary.)
        memory: what the cut may take on each lane: bytes, "20GiB", a device's name, or a list.
            None: what is free on an accelerator; no limit on the CPU.
        optimizer: whose states count as memory, and whose step as time: a name in ``torch.optim``,
            an optimizer, or a number of tensors for each parameter. None: Adam's two, and no time.
        example_target: a target, with which ``memory`` also counts what ``loss_fn`` saves, and the
            cut and predictions how long it takes.
        training: False: outputs only, and no memory for gradients.
        dump: a folder for a page that shows what each pass changed; or ``FXPIPE_DUMP=folder``.
        verbose: log where the time of each compilation goes; or ``FXPIPE_LOGS=compile``.
        cache: a folder for what other processes need not trace again; or ``FXPIPE_CACHE=folder``.

    The page "All options" of the documentation says more of each.

    Returns:
        A module with the model's signature, outputs, parameters and state dict. The parameters are
        the model's own, moved to the devices of their stages.

    Raises:
        ValueError, TypeError: if an argument makes no sense; the message says what would.
        TraceError, BatchError, PartitionError: at compilation, if the model cannot be traced, if
            its batch dimensions or the meaning of its outputs cannot be settled, or if the model
            cannot be cut.
        DoesNotFit: at compilation, if no cut fits into the memory of the lanes; the message says
            how many bytes are missing, and which other calls would fit.
    """
    call = WrittenCall.of(compile, "fxpipe.compile", locals())
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a model, an nn.Module, and is given {kind(model)}")
    if isinstance(model, Pipeline):
        raise TypeError(
            f"compile takes a model, and {type(model.module).__name__} is a pipeline already: give "
            "its model, pipe.module"
        )
    for path, module in model.named_modules():
        if isinstance(module, Pipeline):
            raise TypeError(
                f"{path} of {type(model).__name__} is a pipeline, which runs its own stages, so "
                f"that it cannot be a part of another one: put its model there, {path}.module, "
                "and compile the whole"
            )
    has_example = example_inputs is not None or example_kwargs is not None
    ranks = Ranks.of(devices)
    if ranks is None and sharded_modules(model):
        raise ValueError(
            f"{type(model).__name__} has modules that fully_shard has spread over ranks: compile "
            'it for the ranks of a mesh of two dimensions, such as ("dp", "pp"), and not for a '
            "list of devices"
        )
    if parameters_in_parts(model):
        if ranks is None:
            raise ValueError(
                f"{type(model).__name__} has parameters of which several ranks have parts, as by "
                "parallelize_module. The lanes of a list of devices, at work at the same time, "
                "would mix up the collectives of such modules: compile it for the ranks of a mesh "
                'of two dimensions, "pp" for the stages and "tp" for the parts'
            )
        if costs == "measured":
            raise ValueError(
                "costs cannot be measured where several ranks have parts of the same parameters: "
                'each rank would measure for another number of rounds; give costs="analytic"'
            )
        costs = "analytic" if costs == "auto" else costs
    options = Options.of(
        devices if ranks is None else ranks.devices,  # type: ignore[arg-type]
        schedule,
        stages,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        check=check,
        stage_backend=None if stage_backend is None else StageBackend(stage_backend),
        dynamic=dynamic,
        memory=memory,
        optimizer=optimizer,
        example_target=example_target,
        training=training,
        chunks=chunks,
        partition=within(partition, boundaries),
        costs=costs,
        can_measure=has_example,
        checkpoint=modes_of(checkpoint),
        checkpoint_segments=segments_of(checkpoint_segments, checkpoint),
        deferred_batch_norm=deferred_batch_norm,
        in_dims=in_dims,
        out_dims=out_dims,
        tracer=tracer,
        passes=default_chain() if passes is None else passes,
        observer=dump_of(dump),
        verbose=verbose,
        call=call,
        cache=cache or os.environ.get(CACHE) or None,
    )
    pipeline = Pipeline(model, options) if ranks is None else RankPipeline(model, options, ranks)
    if has_example:
        if example_inputs is not None and not isinstance(example_inputs, tuple):
            raise TypeError(
                "example_inputs is the tuple of the model's arguments, and is given "
                f"{kind(example_inputs)}: write example_inputs=(x,) for one argument"
            )
        if example_kwargs is not None and not isinstance(example_kwargs, dict):
            raise TypeError(
                f"example_kwargs is {kind(example_kwargs)}: give a dict from the names of the "
                "model's arguments to their values"
            )
        pipeline.prepare(*(example_inputs or ()), **(example_kwargs or {}))
    return pipeline
