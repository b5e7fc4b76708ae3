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
from fxpipe.ir.text import kind
from fxpipe.pipeline import Pipeline
from fxpipe.planning.limits import Memory
from fxpipe.ranks import RankPipeline
from fxpipe.runtime.compiled.stage import Given, StageBackend
from fxpipe.schedule import Schedule
from fxpipe.trace import CustomTracer
from passes import Chain, default_chain
from passes.common.modes import Modes, modes_of
from passes.cost.choice import Costs
from passes.partition.partition import Spec, within

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


CACHE = "FXPIPE_CACHE"
"""The environment variable that names the folder of the cache."""


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

    Args:
        model: the model; the pipeline shares its parameters.
        devices: the device of each lane. Devices may repeat: ``["cpu", "cpu"]`` is two lanes on the
            CPU. None: every visible accelerator, or two CPU lanes if there is none. A lane has one
            stage, or as many as ``schedule`` and ``stages`` say. For a ``DeviceMesh`` of one
            dimension, or a ``ProcessGroup``, each of its processes is a lane, and all of them
            compile the same model; see :class:`fxpipe.ranks.RankPipeline`. A mesh of two dimensions
            has its stages along the one that is called "pp". Along the other one it has parts of
            the same parameters, if it is called "tp", and otherwise replicas.
        example_inputs, example_kwargs: the arguments of one mini-batch, as a tuple and a dict. If
            either is given, the pipeline is compiled now, otherwise at its first call.
        chunks: the number of micro-batches in a mini-batch. None: the number that ``schedule`` has,
            if it is a :class:`fxpipe.schedule.Schedule`, else four for each stage. "auto": the
            number with which a step (or a call, without ``training``) is predicted to take least
            time; it is chosen for the first mini-batch, among the numbers that cut it evenly, up to
            eight for each device. (If ``costs`` are given, they say nothing of what one more
            micro-batch costs: then it is four for each device.) For ``schedule="auto"``, None means
            "auto". A batch with fewer rows than that has fewer micro-batches, which keep their
            order in the schedule. A model whose graph holds for one batch size only may get fewer
            too, all of one size.
        partition: where to cut the model. "auto"; or the names of the modules or nodes that begin a
            stage; or a dict from names to stages; or a function that takes the model graph and
            returns one of these; or an :class:`Auto`, which sets what is balanced (time, memory),
            and under which conditions.
        boundaries: where an automatic cut may be: at the begin and at the end of each module whose
            path, or the end of it, is one of these. A ``*`` stands for one name:
            ``["model.layers.*"]`` allows cuts between layers only. None: everywhere.
        costs: where the automatic cut takes the times of nodes from. "analytic": an estimate.
            "measured": each node runs and is timed on the first device. Or a :class:`Profile`, the
            path of a saved one, or a dict from names of nodes or modules to seconds. "auto":
            "measured" on accelerators if there are example inputs, else "analytic".
        checkpoint: which micro-batches keep no activations, but recompute them in the backward:
            "never", "always", or "except_last" (all but the last); or a list with one of these for
            each stage. "auto": the compiler chooses the mode of each stage together with the cut,
            so that the step fits into the memory that is known (see ``memory``) and takes least
            time; without a limit of memory it is "never".
        checkpoint_segments: the number of segments of a checkpointed stage. The inputs of all
            segments are kept, and each segment is recomputed on its own, so that the activations of
            only one segment exist at a time. (If a schedule puts weight gradients off, the
            activations from which they are computed exist until then.)
        schedule: the order of a training step, :meth:`Pipeline.step`: one of
            :data:`fxpipe.schedule.NAMES`; or a :class:`fxpipe.schedule.Schedule` with as many lanes
            as there are devices. "auto": of all these names, with as many stages as each takes and
            the number of ``chunks`` that suits it, the one with which a step is predicted to take
            least time and fits; or an order of its own, if that is faster. It is chosen at the
            first call, by the search that :func:`fxpipe.tune` shows as a table; the report says
            what has been chosen, and what others would take. Of several ranks the first one chooses
            for all. What the user gives (``chunks``, ``stages``, ``partition``, ``checkpoint``)
            stays.
        stages: the number of stages. None: as many as the schedule takes, which is one for each
            device, or two for "interleaved_1f1b", "looped_bfs", "zbv" and "dualpipe_v".
        loss_fn: the loss function of :meth:`Pipeline.step`: ``loss_fn(output, target)`` returns a
            scalar. None: the model returns its loss, as its output, as the first element of a
            tuple, or under the name "loss".
        loss_weight: the weight of each micro-batch in the loss of the mini-batch, which is the sum
            of all losses times their weights over the sum of the weights. A function of a
            micro-batch that returns a number: it is called with the micro-batch's target; or, if
            there is no ``loss_fn``, with the model's arguments by name
            (``lambda labels, **_: (labels != -100).sum()``). :mod:`fxpipe.loss_weight` has such
            functions. Or "rows" for a loss that is a mean over rows, or "sum" for one that is a
            sum. None: the check finds out which of the two the loss is.
        in_dims, out_dims: the batch dimensions of inputs and outputs that cannot be inferred: an
            int or None for all of them, or values nested like the arguments, or like the output. An
            output without a batch dimension (None) is averaged over the micro-batches, weighted by
            their sizes. It is added up if "sum" is given in place of None, or if the check finds
            that it is a sum over the rows. In ``in_dims``, "list" means that a list has one element
            for each row, and is cut between elements: ``{"images": "list", "targets": "list"}`` for
            a detection model.
        deferred_batch_norm: whether the running statistics of batch norms are updated once for each
            mini-batch, as without a pipeline. Either way, each micro-batch is normalised by its own
            statistics.
        tracer: the front end that traces the model: "auto", "symbolic", "export", or a function
            ``(model, args, kwargs) -> fx.GraphModule``.
        passes: the chain of passes to run. None: :func:`fxpipe.default_chain`, to which you can add
            passes of your own: ``fxpipe.default_chain().before("split", Mine())``.
        check: whether the results of micro-batches are compared with the model's on a whole batch,
            on a few rows, each time a kind of call is compiled. True: a call for which they differ
            is refused. "warn": it runs, with a warning. False: it runs without one.
        stage_backend: the backend that compiles each stage, forward and backward, as
            ``torch.compile`` takes it ("inductor", or a function of a graph module and example
            inputs); or a dict of arguments of ``torch.compile``, ``{"backend": "inductor", "mode":
            "max-autotune"}``. A stage that it cannot compile runs as it is, with a warning. None:
            all stages run as they are.
        dynamic: whether a program may serve inputs of other sizes than those it was compiled for,
            in other dimensions than the batch's: sequences of other lengths, pictures of other
            heights and widths. None: the first one is for the sizes of its inputs, and those
            compiled once another size has come are for all sizes that the model treats alike, so
            that most models are compiled twice at most. True: already the first one is, which takes
            longer to compile. False: each shape has a program of its own. (The batch size may
            always vary, and so may all sizes where symbolic tracing can trace the model.)
        memory: the memory that the cut may take on each lane for a training step: bytes, text such
            as "20GiB" or "400MiB", the name of a known device, or a list with one of these for each
            lane. It counts parameters, gradients, states of the optimizer and buffers; activations
            of all micro-batches under way; what operators need while they run; and values that wait
            to be sent. None: what is free on an accelerator, and no limit on the CPU.
        optimizer: the optimizer whose states count as memory: the name of one in ``torch.optim``
            ("adamw"), an optimizer, or the number of tensors that it keeps for each parameter.
            None: Adam's, which are two.
        example_target: the target of one mini-batch, as :meth:`Pipeline.step` takes it; its tensors
            may be on "meta". With it, ``memory`` also counts what ``loss_fn`` saves for its
            backward: the function is called once on tensors without values. None: the target of the
            first call counts if that is a step, and otherwise the report says what is missing.
        training: whether the pipeline is to be trained. False: it only computes outputs. Then no
            memory is counted for gradients, optimizers, or activations that a backward needs; the
            model is cut by the time of its forward and by the memory of its weights; calls run as
            under ``torch.no_grad()``, and a backward from their outputs is refused, as are
            :meth:`Pipeline.step` and the options of training. Dropout and batch norm still go by
            ``train()`` and ``eval()``.
        dump: a folder, in which ``index.html`` shows what each pass changed: the graph as text, as
            code and, if it is small, drawn, after every pass. None: the folder that the environment
            variable ``FXPIPE_DUMP`` names, if it is set.
        verbose: whether each compilation logs where its time goes, as a table of its phases, with
            the logger "fxpipe.compilations" (on stderr if logging has not been set up).
            The environment variable ``FXPIPE_LOGS=compile`` does the same.
        cache: a folder in which the results of tracing and checking are kept, for other processes
            that compile the same model with the same options for the same kind of call, see
            :mod:`fxpipe.compiler.disk`. None: the folder that the environment variable
            ``FXPIPE_CACHE`` names, if it is set.

    Returns:
        A module with the model's signature, outputs, parameters and state dict. The parameters are
        the model's own, moved to the devices of their stages.

    Raises:
        ValueError, TypeError: if an argument makes no sense; the message says what would.
        TraceError, BatchError, PartitionError: at compilation, if the model cannot be traced, if
            its batch dimensions or the meaning of its outputs cannot be settled, or if the model
            cannot be cut.
        DoesNotFit: at compilation, if no cut is found that fits into the memory of the lanes; the
            message says how many bytes are missing, and which other calls would fit.
    """
    call = WrittenCall.of(compile, "fxpipe.compile", locals())
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a model, an nn.Module, and is given {kind(model)}")
    if isinstance(model, Pipeline):
        raise TypeError(
            f"compile takes a model, and {type(model.module).__name__} is a pipeline already: give "
            "its model, pipe.module"
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
        checkpoint_segments=checkpoint_segments,
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
