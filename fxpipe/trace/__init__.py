"""Front ends: they trace a model, called on example inputs, into the model graph.

Two front ends are tried in turn. ``torch.fx``'s symbolic tracing comes first: it keeps the model's
own modules and leaves every size symbolic. Models that it cannot trace are traced by
``torch.export``. Neither is trusted: each graph is run beside the model, at several batch sizes,
since micro-batches are smaller than the example's batch, and a graph whose results differ is
dropped. Where the check of what a pipeline means runs the graph of torch.export beside the model
(:mod:`fxpipe.meaning.by_graph`), that is the comparison. Tracing leaves the model, its buffers and
the random number generators as they were.

::

    example              the call that is traced: its tensors, and its constants
    attributes           the attributes that are set on inputs
    arguments            the arguments that a call changes
    twin                 a copy of the model's structure, which is run and traced in its place
    isolation            runs the model, and puts back what the run has changed on it
    symbolic, export     the two front ends
    on_meta              how they trace a model that is on no device
    sizes                the sizes of inputs for which an exported graph is right
    checks               runs a front end's graph beside the model, and compares
    other_sizes          does so at other sizes than the example's
    premises             the attributes of the model that a trace depends on
    patches              the functions of PyTorch that are patched during a trace
    asker                who asks PyTorch for something: the model, or PyTorch itself
    asked                what a model asks about a value by functions that are built into Python
    proxies, texts       what it does with a value that fx, or export, does not see
    outside              whether a model asks if gradients are recorded, and to what effect
    layouts              the same for the layout of tensors
    uneven               inputs without a pattern, on which a model hides less
    folded               the tensors of the model of which a graph has constants
    state, settled       what a call changes on modules, beside tensors
    repeated, operators  layers that repeat are exported once
    whole, functions, checkpoints, regions, conditions, reads, running
                         how parts are kept that torch.export cannot look into
    handed               what parts of a graph hand to each other through Python objects
    left_behind          what they leave there, which a loss may find
    drawn_backwards      refuses random numbers in the backward of an autograd Function
    containers           notices lists that a call changes although its graph does not see it
    errors               messages for models that no front end can trace

All graphs are called alike: with a value for each tensor among the inputs, in the order in which
pytree flattens ``(args, kwargs)``. The other inputs (None, flags, sizes...) are constants of the
graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from fxpipe.ir.errors import NeedsValues, TraceError, Unsupported, is_the_models
from fxpipe.ir.log import warn
from fxpipe.ir.progress import phase
from fxpipe.ir.structure import Structure, all_parts, leaves
from fxpipe.ir.tensors import tensors_of
from fxpipe.trace import (
    checks,
    drawn_backwards,
    export,
    handed,
    layouts,
    outside,
    recorders,
    state,
    symbolic,
)
from fxpipe.trace.attributes import attributes_refused
from fxpipe.trace.errors import Refused, advice, failure, may_be_the_models, suppressed
from fxpipe.trace.example import (
    BatchDims,
    Example,
    Traced,
    bound_arguments,
    canonical,
)
from fxpipe.trace.global_values import refuse_thread_locals
from fxpipe.trace.isolation import Args, Kwargs, called, parameters_put_back, untouched
from fxpipe.trace.itself import explain
from fxpipe.trace.other_sizes import with_proven_sizes
from fxpipe.trace.patches import LOCK
from fxpipe.trace.replaced import refuse_replaced
from fxpipe.trace.settled import settled

__all__ = [
    "Args",
    "BatchDims",
    "CustomTracer",
    "Kwargs",
    "NeedsValues",
    "TraceError",
    "Traced",
    "bound_arguments",
    "called",
    "canonical",
    "examine_users_code",
    "parameters_put_back",
    "refuse_iterators",
    "refuse_lazy",
    "refuse_nested",
    "runs_alike",
    "to_be_compared",
    "trace",
    "traced_before",
    "untouched",
    "warn_of_what_is_gone",
]

CustomTracer = Callable[[nn.Module, Args, Kwargs], fx.GraphModule]


def trace(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs | None = None,
    *,
    tracer: str | CustomTracer = "auto",
    batch_dims: BatchDims | None = None,
    any_size: bool = False,
    check: bool = True,
) -> Traced:
    """Trace ``model``, as called with ``args`` and ``kwargs``, into a model graph.

    Args:
        tracer: "auto" (symbolic, then export), "symbolic", "export", or a function
            ``(model, args, kwargs) -> fx.GraphModule`` with a placeholder for each input tensor.
        batch_dims: for each input tensor, in order, its batch dimension or None; by default the
            first, of every tensor whose first dimension has the size most of them have.
        any_size: whether other sizes of the inputs may vary as well, where the model lets them;
            ``Traced.sizes`` says for which sizes the graph is right. If not, an exported graph is
            for the example's sizes, and for any batch size; so it is without ``check``.
        check: whether to run the model and its graph, and compare what they give. Give False for a
            model on "meta", whose tensors have no values to compare.

    Raises:
        TraceError: if no front end gives a graph that computes what the model computes.
        ValueError: for a ``tracer`` that does not exist, or for ``batch_dims`` that do not have one
            entry for each tensor.

    What the model itself raises on these inputs is passed on as it is.
    """
    # Only one thread may trace at a time: fx patches nn.Module, and a trace changes the model
    # before it is put back.
    with LOCK:
        example = Example.of(
            model, args, kwargs or {}, batch_dims, any_size=any_size, is_compared=check
        )
        return _trace(example, tracer, check)


def to_be_compared(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    tracer: str | CustomTracer,
    batch_dims: BatchDims,
) -> Traced | None:
    """The graph of a model by ``torch.export``, which the caller has to compare with the model
    before it is used, and to warn of (:func:`warn_of_what_is_gone`). It takes one trace, and no run
    of the model.

    None where :func:`trace` has to do more: where another front end comes first; where the model
    has hooks, or parts that are kept whole, or an input has attributes, of which runs of the model
    tell more; or where the model cannot be traced.
    """
    if tracer not in ("auto", "export") or recorders.has_hooks(model):
        return None
    with LOCK:
        example = Example.of(model, args, kwargs, batch_dims)
        if example.attributes:
            return None
        try:
            _refuse_what_has_no_values(model, example)
            _refuse_what_cannot_be_traced(model, example)
            tried = _why_not_symbolic(example) if tracer == "auto" else ()
            if tried is None:
                return None
            with phase("export", quiet=True):
                traced = export.front_end(example)
            traced.tried = tried
        except Exception as error:  # trace() says what is wrong
            if not isinstance(error, TraceError | Unsupported) and not may_be_the_models(error):
                raise
            return None
        traced.otherwise = None  # it is not needed, and refers to modules
        if not all(map(_is_of_operators, traced.graph_module.modules())):
            return None
        return traced


def runs_alike(
    model: nn.Module, args: Args, kwargs: Kwargs, traced: Traced, batch_dims: BatchDims
) -> bool:
    """Whether a graph does what the model does in a real run, with random numbers and statistics of
    the batch, on as few rows as the model takes. What these are is noted in ``refused_sizes``.

    False also where the model writes to parameters, changes attributes, modes or global variables,
    puts tensors into these, or draws random numbers on the host, about which :func:`trace` finds
    out more.
    """
    with LOCK:
        example = Example.of(model, args, kwargs, batch_dims)
        with phase("references", quiet=True), suppressed():
            with (
                attributes_refused(example),
                outside.modes_asked() as lines,
                layouts.layouts_asked() as of_layouts,
            ):
                reference = checks.smallest_reference(example, recorded=True)
            outside.refuse_other_outputs(example, reference.tensors, lines)
            layouts.refuse_other_outputs(example, reference.tensors, of_layouts)
            seen = reference.result
            changed = seen.changed or seen.modes or seen.replaced
            if changed or seen.written or seen.draws or seen.outside or seen.assigned:
                return False
            with phase("comparison", quiet=True):
                checks.compare(example, [reference], traced, checks.EXPORT_TOLERANCE)
                layouts.compare(example, reference.tensors, traced, of_layouts)
            traced.refused_sizes = checks.refused_sizes(example, [reference])
            return True
        return False


def _of_tensor_hooks(traced: Traced) -> str:
    """What may be the cause where a graph has other gradients; "" if the forward has no hooks on
    tensors."""
    if not traced.hooked:
        return ""
    return f"; the forward registers a hook on a tensor (at {traced.hooked[0]}), which no graph has"


def warn_of_what_is_gone(model: nn.Module, traced: Traced) -> None:
    """Say that the model has lines that print, or that register hooks on tensors, which the graph
    does not have. (A hook that changes a gradient has been seen in the comparison of gradients.)"""
    if traced.hooked:
        warn(
            f"{type(model).__name__} registers a gradient hook on a tensor within its forward (at "
            f"{traced.hooked[0]}), which a pipeline does not call: it computes what was traced. "
            "Where the hook is needed, call the model itself, pipe.module"
        )
    if traced.prints:
        warn(
            f"{type(model).__name__} prints within its forward (at {traced.prints[0]}), which a "
            "pipeline does not: it computes what was traced. To see a value in each step, let the "
            "model return it."
        )


def _is_of_operators(module: nn.Module) -> bool:
    """Whether a module within a graph is a graph itself, or only leads to tensors: it is no module
    that is kept whole, and no checkpoint."""
    return isinstance(module, fx.GraphModule) or type(module) is nn.Module


def _why_not_symbolic(example: Example) -> tuple[str, ...] | None:
    """Why symbolic tracing gives no graph, as ``Traced.tried`` has it; None if it gives one."""
    try:
        with phase("symbolic", quiet=True):
            symbolic.front_end(example)
    except Exception as error:
        if not may_be_the_models(error):
            raise
        return (failure("symbolic", error),)
    return None


def traced_before(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    make: Callable[[Example, Structure], Traced],
    *,
    batch_dims: BatchDims,
    any_size: bool,
    check: bool,
) -> Traced:
    """The graph of a model that another process has traced, once it has been run beside the model
    on as few rows of this example as the model takes.

    Args:
        make: makes the graph for an example, and for the structure of the model's output.
        batch_dims, any_size, check: as for :func:`trace`.

    Raises:
        TraceError: if the graph does not give what the model gives.
    """
    with LOCK:
        example = Example.of(model, args, kwargs, batch_dims, any_size=any_size, is_compared=check)
        reference = checks.smallest_reference(example)
        _, structure = Structure.of(reference.result.output)
        traced = make(example, structure)
        if check:
            tolerance = 0.0 if traced.front_end == "symbolic" else checks.EXPORT_TOLERANCE
            try:
                checks.compare(example, [reference], traced, tolerance)
            except Refused as error:
                raise TraceError(str(error)) from error
        return traced


def examine_users_code(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    traced: Traced,
    batch_dims: BatchDims,
    *,
    in_one_lane: bool = False,
) -> None:
    """Find out what the user's code does which a graph runs as it is: modules that are kept whole,
    functions, and hooks. Nodes of it that hand something to each other are marked
    (:mod:`fxpipe.trace.handed`).

    Args:
        in_one_lane: whether everything runs in one lane, and so in the same order in each run.

    Raises:
        TraceError: for random numbers in the backward of an autograd Function, in several lanes.
    """
    with LOCK:
        example = Example.of(model, args, kwargs, batch_dims)
        sizes = [size for size in (2, 3, 4) if size < (example.batch or 0)]
        few = [example.resized(size) for size in sizes if size not in traced.refused_sizes]
        for tensors in [*few[:1], example.tensors]:
            try:
                handed.note(example, tensors, traced)
                if not in_one_lane:
                    drawn_backwards.refuse(example, tensors, traced)
                return
            except Refused as error:
                raise TraceError(str(error)) from None
            except Exception as error:  # a graph may be for the example's size only
                if not is_the_models(error) or tensors is example.tensors:
                    raise


def _trace(example: Example, tracer: str | CustomTracer, check: bool) -> Traced:
    model = example.model
    front_ends = _front_ends(tracer)
    if check:
        _refuse_what_has_no_values(model, example)
    _refuse_what_cannot_be_traced(model, example)
    if check:
        recorders.learn(example)
    try:
        with phase("references", quiet=True):
            with (
                attributes_refused(example),
                outside.modes_asked() as lines,
                layouts.layouts_asked() as of_layouts,
            ):
                references = checks.references(example) if check else []
            if references:
                outside.refuse_other_outputs(example, references[-1].tensors, lines)
                layouts.refuse_other_outputs(example, references[-1].tensors, of_layouts)
        _refuse_returned_iterators(model, references)
    except TraceError:
        raise
    except Exception as error:
        if is_the_models(error):
            explain(model, error)
        raise

    if references:
        refuse_replaced(model, references[0].result.replaced)
        whole, changed = state.kept_whole(example, references[0])
        example = replace(example, whole=whole)
        state.refuse_assigned_variables(example, references[0])
        state.tell_of_what_is_outside(example, references[0])
        set_once = settled(example, references[0])
        # What is set may depend on the sizes: a graph for other sizes would set something else.
        example = replace(example, any_size=example.any_size and not set_once)
    reasons: list[str] = []
    written = references[0].result.written if references else {}
    for name, front_end in front_ends.items():
        warning = ""
        try:
            with ExitStack() as stack:
                is_export = check and front_end is export.front_end
                if is_export and stack.enter_context(recorders.changing_called(example)):
                    references = checks.references(example)
                if references and name == "custom":
                    references = [*references[:1], *checks.at_more_rows(example), *references[1:]]
                with phase(name, quiet=True):
                    traced = front_end(example)
                refuse_thread_locals(traced.graph_module)
                warning = traced.warning + _of_tensor_hooks(traced)
                if references:
                    with phase("comparison", quiet=True):
                        traced = _checked(example, references, traced)
                        layouts.compare(example, references[-1].tensors, traced, of_layouts)
                    traced.refused_sizes = checks.refused_sizes(example, references)
                    if traced.front_end != "symbolic":
                        traced.settled = set_once
                    with phase("other sizes", quiet=True):
                        traced.sizes = with_proven_sizes(example, references[-1], traced)
            traced.otherwise = None  # it is not needed any more, and refers to modules
            traced.tried = tuple(reasons)
            if references:
                state.tell(example, references[0], changed, traced.graph_module)
            warn_of_what_is_gone(model, traced)
            return traced
        except Exception as error:  # a front end runs the model's code, which may raise anything
            if not may_be_the_models(error):
                raise
            reasons.append(failure(name, error) + warning)
            last = error
    if written:
        name, where = next(iter(written.items()))
        reasons.append(
            f"It writes to its parameters: {name}, by {where}. Update them outside of the forward, "
            "after each step; or keep these tensors in buffers (self.register_buffer), to which a "
            "forward may write"
        )
    if references:
        reasons += outside.reasons(example)
    if made := checks.made_buffers(example):
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise TraceError(f"{made}. No front end can trace it as it is:\n{listed}") from last
    raise TraceError(
        f"no front end can trace {type(model).__name__}:\n"
        + "\n".join(f"  {reason}" for reason in reasons)
        + "\nChange the model at the lines named, put what cannot be traced into a module of its "
        "own, which is then kept whole, or pass tracer=, a function (model, args, kwargs) -> "
        f"fx.GraphModule.{advice(reasons)}{_LABELS * _takes_labels(example)}"
    ) from last


_LABELS = (
    " Where these lines compute a loss: call the pipeline without labels, and compute the loss of "
    "what it returns; a Trainer of transformers takes compute_loss_func= for that."
)


def _takes_labels(example: Example) -> bool:
    """Whether a call has labels, by the name that models of transformers give them."""
    return any(name == "labels" or name.startswith("labels_") for name in example.names)


def _checked(example: Example, references: list[checks.Reference], traced: Traced) -> Traced:
    """Compare a graph with the model, and return it if both give the same. If they do not, the
    graph of the alternative attempt ``traced.otherwise`` is compared and returned.

    Raises ``Refused`` if neither graph gives the same; the message says how the first one differs.
    """
    try:
        tolerance = 0.0 if traced.front_end == "symbolic" else checks.EXPORT_TOLERANCE
        checks.compare(example, references, traced, tolerance)
        if traced.may_lose_gradients:
            checks.compare_gradients_of_inputs(example, references[-1], traced)
        if example.whole:
            state.compare(example, references[0], traced, tolerance)
        return traced
    except Refused as refusal:
        if traced.otherwise is None:
            raise
        try:
            return _checked(example, references, traced.otherwise(example))
        except Exception as error:
            if not may_be_the_models(error):
                raise
        raise refusal


def _refuse_what_has_no_values(model: nn.Module, example: Example) -> None:
    own = dict((*model.named_parameters(), *model.named_buffers()))
    unset = [name for name, tensor in own.items() if tensor.is_meta]
    if unset:
        others = f" and {len(unset) - 1} others" if len(unset) > 1 else ""
        raise TraceError(
            f"{type(model).__name__} has parameters without values ({unset[0]}{others}): "
            'they are on the device "meta"; load the model ahead of compiling it, say by '
            'model.to_empty(device="cpu") and load_state_dict()'
        )
    for name, tensor in zip(example.names, example.tensors, strict=True):
        if tensor.is_meta:
            raise TraceError(
                f'the input {name} has no values: it is on the device "meta"; give one that has'
            )


_TAKEN = {*dir(fx.GraphModule(nn.Module(), fx.Graph()))} - {*dir(nn.Module())}
_COMPRESSED = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc


def refuse_lazy(model: nn.Module) -> None:
    """Raise :class:`Unsupported` for a model with lazy modules that have not run yet: their tensors
    have no memory, which nothing that is done with a model may look at."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    if (name := next((name for name, tensor in named if is_lazy(tensor)), None)) is not None:
        raise Unsupported(
            f"{type(model).__name__} has parameters without a shape, {name} for one: run it once, "
            "so that its lazy modules make theirs"
        )


def refuse_nested(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raise :class:`Unsupported` if there is a nested tensor among the inputs of a call: it has no
    shape, which all that is done with an input asks for."""
    for name, value in bound_arguments(model, args, kwargs).arguments.items():
        if any(tensor.is_nested for tensor in tensors_of(value)):
            raise Unsupported(
                f"the input {name} is a nested tensor, which cannot be cut into micro-batches: "
                f"give it padded, by torch.nested.to_padded_tensor({name}, 0.0), with a mask"
            )


def refuse_iterators(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raise :class:`Unsupported` if there is an iterator among the arguments of a call: the check
    of what a pipeline means would use it up, and no later run of the model could read it."""
    for path, part, _ in all_parts(dict(bound_arguments(model, args, kwargs).arguments)):
        if isinstance(part, Iterator):
            where = path.removeprefix(".")
            raise Unsupported(
                f"the argument {where} is a {type(part).__name__}, which can be gone through only "
                "once, and a model is run several times while it is compiled, and once for each "
                f"micro-batch: give a list or a tuple, such as list({where})"
            )


def _refuse_what_cannot_be_traced(model: nn.Module, example: Example) -> None:
    refuse_lazy(model)
    refuse_nested(model, *example.arguments(example.tensors))
    if isinstance(model, torch.jit.ScriptModule):
        raise Unsupported(
            f"{model.original_name} is compiled to TorchScript, which cannot be traced: compile "
            "the nn.Module from which it was made"
        )
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in _TAKEN:
            raise Unsupported(
                f"{type(model).__name__} has a part that is called {name!r}, a name that every "
                "fx.GraphModule needs for itself; give it another name, or compile the model as a "
                "part of another module, nn.Sequential(model) for one, whose state dict has the "
                'same keys with "0." ahead of each'
            )
    for name, tensor in zip(example.names, example.tensors, strict=True):
        if tensor.layout in _COMPRESSED:
            raise Unsupported(
                f"the input {name} is of layout {tensor.layout}, for which PyTorch has no fake "
                f"tensors, with which a model is compiled: give it dense, by {name}.to_dense(), "
                f"or, where all micro-batches share it, as {name}.to_sparse_coo()"
            )
    if example.batch == 0:
        raise Unsupported("the example batch is empty: give one with two rows or more")
    for _, leaf in leaves(example.arguments(example.tensors)):
        # A graph would keep an array as a constant, and repeat it at every call.
        if not isinstance(leaf, Tensor) and getattr(leaf, "ndim", 0) > 0:
            raise Unsupported(
                f"an input is a {type(leaf).__name__}, whose values a graph cannot see: pass it as "
                "a tensor"
            )


def _refuse_returned_iterators(model: nn.Module, references: list[checks.Reference]) -> None:
    for reference in references[:1]:
        for path, leaf in leaves(reference.result.output):
            if isinstance(leaf, Iterator):
                where = f" at output{path}" if path else ""
                raise TraceError(
                    f"{type(model).__name__} returns a {type(leaf).__name__}{where}: what is in it "
                    "is computed after the model has returned; return a list or a tuple of it"
                )


def _front_ends(tracer: str | CustomTracer) -> dict[str, Callable[[Example], Traced]]:
    known: dict[str, Callable[[Example], Traced]] = {
        "symbolic": symbolic.front_end,
        "export": export.front_end,
    }
    if callable(tracer):
        return {"custom": partial(_custom, tracer)}
    if tracer == "auto":
        return known
    if tracer in known:
        return {tracer: known[tracer]}
    raise ValueError(
        f'tracer is {tracer!r}: give "auto", "symbolic", "export", or a function '
        "(model, args, kwargs) -> fx.GraphModule"
    )


def _custom(tracer: CustomTracer, example: Example) -> Traced:
    args, kwargs = example.arguments(example.tensors)
    with untouched(example.model):
        graph_module = tracer(example.model, args, kwargs)
    if not isinstance(graph_module, fx.GraphModule):
        raise Refused(f"it returned a {type(graph_module).__name__}, not an fx.GraphModule")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example.tensors):
        raise Refused(
            f"its graph has {len(placeholders)} placeholders for {len(example.tensors)} "
            f"input tensors ({', '.join(example.names)})"
        )
    graph_module.graph.set_codegen(fx.graph.CodeGen())
    graph_module.recompile()
    return Traced(graph_module, "custom", example.binder(), lambda output: output)
