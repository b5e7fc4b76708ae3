"""The front end that traces with ``torch.export``, for models that symbolic tracing cannot trace.

If an export fails, the next strategy is tried: the module that could not be traced is kept whole,
as one node that export does not look into.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import skip
from fxpipe.ir._torch import FakeTensor, at_most_guards
from fxpipe.ir.checks import is_check
from fxpipe.ir.graph import WHOLE
from fxpipe.ir.hooks import is_watched
from fxpipe.ir.log import warn
from fxpipe.ir.source import model_frame
from fxpipe.ir.structure import Structure
from fxpipe.trace import checkpoints, whole
from fxpipe.trace.asked import questions_answered, real_of_export
from fxpipe.trace.blame import Blamed, NotWhole
from fxpipe.trace.conditions import asserted
from fxpipe.trace.errors import Refused, may_be_the_models, sentence
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.functions import functions_called
from fxpipe.trace.isolation import buffers_kept, parameters_put_back, untouched
from fxpipe.trace.keywords import refuse_keywords
from fxpipe.trace.lines import lines_of_the_model
from fxpipe.trace.on_meta import exported_somewhere
from fxpipe.trace.operators import operators_of
from fxpipe.trace.patches import (
    data_used,
    eased,
    fx_here,
    prints,
    silent,
    tensor_hooks,
    unwarned,
)
from fxpipe.trace.premises import unwatched
from fxpipe.trace.reads import blamed_on_the_reader, values_read
from fxpipe.trace.regions import enclose_transforms, enclose_unknown_sizes, sized_by_values
from fxpipe.trace.repeated import DoesNotRepeat, Repeated, repeated
from fxpipe.trace.running import Running
from fxpipe.trace.sizes import MANY, Sizes, any_kernel, model_lines, sizes_of
from fxpipe.trace.slices import without_whole_slices
from fxpipe.trace.texts import texts_guarded
from fxpipe.trace.twin import model_of
from fxpipe.trace.unregistered import MetParameters, constants_told


@dataclass(frozen=True)
class Strategy:
    """The settings of one attempt to export a model: ways around what export cannot trace."""

    whole: Mapping[nn.Module, str] = field(default_factory=dict)
    """The modules that are kept whole, with their paths."""
    functions_as_nodes: bool = False
    """Whether a ``torch.autograd.Function`` becomes one node. If not, export traces into its
    forward, and loses the backward that it defines."""
    detached_data: bool = False
    """Whether the model gets ``tensor.detach()`` in place of ``tensor.data``, of which export loses
    track."""
    any_size: bool = False
    """Whether every dimension of the inputs is left symbolic, or the batch's only."""
    layers: Mapping[nn.Module, str] = field(default_factory=dict)
    """The layers that repeat, with their paths: the first one is exported, and its nodes are copied
    for the others."""
    operators: Mapping[str, Hashable] | None = None
    """What each call of these layers runs, where no comparison shows that they are alike; None
    where one does."""


class Failure(Exception):
    """An attempt to export has failed. Has the strategy of the attempt, the error, and the module
    to blame, which is None if no module within the model is."""

    def __init__(self, strategy: Strategy, error: Exception, module: nn.Module | None) -> None:
        super().__init__(str(error))
        self.strategy, self.error, self.module = strategy, error, module
        self.data_is_used = False


def front_end(example: Example, strategy: Strategy | None = None) -> Traced:
    """Trace by ``torch.export``, with the first strategy that succeeds.

    Each failure leads to the next strategy: the module that is to blame is kept whole as well, and
    after it the module around it, until that would be the model itself.

    Raises what export, or the model, has raised if no strategy succeeds.
    """
    model = example.model
    _warn_of_hooks(model)
    # How large the results of a module that is kept whole are is learned for batch sizes only.
    is_plain = not example.whole
    with unwatched():
        layers = repeated(model) if is_plain else {}
    any_size = example.any_size and is_plain
    first = strategy or Strategy(example.whole, any_size=any_size, layers=layers)
    if not example.is_compared:
        first = replace(first, operators=operators_of(example, first.layers))
    strategies, failures = [first], list[Failure]()
    # Gradients are on: under no_grad, modules may choose kernels that have no backward.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        silent(),
        unwarned(r"torch\."),  # where the model runs, the same warning names a line of its own
        fx_here(),
        eased(),
    ):
        for each in strategies:
            try:
                # What an attempt leaves in the model are fake tensors, with which no run computes.
                with untouched(model):
                    return _attempt(example, each)
            except Failure as failure:
                if each.layers:
                    strategies.append(replace(each, layers={}))
                    continue
                if each.any_size:
                    strategies.append(replace(each, any_size=False))
                    continue
                failures.append(failure)
                strategies += _next(example, failure)
    cause, last = failures[0].error, failures[-1].error
    if isinstance(last, NotWhole) and last is not cause:
        raise Blamed(last.module, f"{sentence(cause)}; {last}") from cause
    raise last


def _next(example: Example, failure: Failure) -> list[Strategy]:
    """The strategy to try after a failure, as a list of one, or of none if nothing is left."""
    strategy = failure.strategy
    kept = whole.next_modules_to_keep(example.model, strategy.whole, failure.module)
    if kept:
        return [replace(strategy, whole=kept)]
    # No module is left to be kept whole, other than the model itself, which cannot be.
    if failure.data_is_used and not strategy.detached_data:
        return [replace(strategy, whole=example.whole, detached_data=True)]
    return []


def _attempt(example: Example, strategy: Strategy) -> Traced:
    """Export the model by one strategy, and return its graph. Raises :class:`Failure`."""
    structures: list[Structure] = []
    running = Running()
    # Export makes constants of sizes 0 and 1, so that a batch must have two rows to be symbolic.
    tensors = example.tensors if example.batch != 1 else example.resized(2)
    with (
        model_lines(),
        lines_of_the_model(),
        any_kernel(),
        at_most_guards(MANY) if strategy.any_size else nullcontext(),
        data_used(detached=strategy.detached_data) as data,
        values_read(running) as read,
        asserted(running) as undecided,
        running.watched(example.model),
    ):
        try:
            calls: dict[str, whole.Opaque] = {}
            once = Repeated(example.model, strategy.layers, calls, strategy.operators)
            if strategy.whole:
                calls |= whole.seen(strategy.whole, _runs(example))
            with (
                whole.kept_whole(strategy.whole, calls),
                functions_called(calls if strategy.functions_as_nodes else None) as functions,
                checkpoints.noted(checkpoints.graph_of_export) as checkpointed,
                once.exported(),
                exported_somewhere(example),
                prints() as printed,
                tensor_hooks() as hooked,
                questions_answered(example.model, real_of_export(example.tensors)),
                texts_guarded(),
                unwatched() as watched,
                constants_told(model_of(example.model)) as met,
            ):
                program = torch.export.export(
                    _OnTensors(example, structures.append, watched),
                    tuple(tensor.clone() for tensor in tensors),
                    dynamic_shapes={"inputs": _dynamic(tensors, example, strategy)},
                    strict=False,
                )
            for caught in undecided:
                raise caught
            _refuse_lost_tensors(program, example)
            _refuse_control_flow(program)
            sizes = sizes_of(program, example.batch_dims)
            if strategy.layers and (functions or checkpointed.found):
                raise DoesNotRepeat("it has backwards or checkpoints of its own")
            with unwatched():
                graph_module = _on_the_model(program, example, calls, once, met)
            checkpoints.enclose(graph_module, checkpointed)
            traced = Traced(graph_module, "export", example.binder(), structures[-1].fill)
            traced.sizes = sizes
            traced.prints, traced.hooked = printed, [line for line in hooked if line]
            unknown = _size_by_value(graph_module, example.model)
            if unknown is not None:
                _enclosed(traced, example, unknown)
        except Exception as error:
            if not may_be_the_models(error):
                raise
            blamed = blamed_on_the_reader(error, read)
            failure = Failure(strategy, blamed, _to_blame(example.model, blamed, running))
            failure.data_is_used = bool(data)
            raise failure from error
    traced.largest_batch = _largest_batch(program, sizes, example.batch or 0)
    traced.warning = _fixed_batch(program, sizes)
    traced.may_lose_gradients = bool(functions) or _has_regions_without_gradients(program)
    otherwise: Strategy | None = None
    if strategy.layers:
        otherwise = replace(strategy, layers={})
    elif functions and not strategy.functions_as_nodes:
        otherwise = replace(strategy, functions_as_nodes=True)
    elif strategy.any_size:
        otherwise = replace(strategy, any_size=False, functions_as_nodes=False)
    if otherwise is not None:
        traced.otherwise = partial(front_end, strategy=otherwise)
    return traced


def _dynamic(
    tensors: Sequence[Tensor], example: Example, strategy: Strategy
) -> tuple[dict[int, Any] | None, ...]:
    """The dimensions of the inputs that stay symbolic: the batch's, and with ``any_size`` all
    others, but for those of sizes 0 and 1, of which export makes constants."""
    found: list[dict[int, Any] | None] = []
    for tensor, batch_dim in zip(tensors, example.batch_dims, strict=True):
        dims = set() if batch_dim is None else {batch_dim}
        if strategy.any_size and tensor.layout == torch.strided:
            dims |= {dim for dim, size in enumerate(tensor.shape) if size > 1}
        found.append({dim: torch.export.Dim.AUTO for dim in sorted(dims)} or None)
    return tuple(found)


def _to_blame(model: nn.Module, error: Exception, running: Running) -> nn.Module | None:
    """The module in which an attempt has failed; None if that is the model itself, or unknown."""
    if isinstance(error, Blamed):
        return error.module
    module = running.raised_by(error)
    if module is not None and module is not model:
        return module
    return None


def _refuse_lost_tensors(program: torch.export.ExportedProgram, example: Example) -> None:
    """Raise an error that blames the module in which export has lost track of a tensor.

    This happens where a module computes with what no tracer sees, such as ``tensor.data``. Export
    then takes the result for a constant and puts it into the graph as an attribute, although it has
    no values and belongs to no attribute of the model.
    """
    for name, constant in program.constants.items():
        path = name.removeprefix("model.").rpartition(".")[0]
        if isinstance(constant, FakeTensor) and not _has(example.model, name):
            owner = example.model.get_submodule(path)
            raise Blamed(
                owner,
                f"torch.export loses track of a tensor in {type(owner).__name__} and would make a "
                "constant of it, as it does where a forward uses tensor.data: tensor.detach() can "
                "be traced",
            )


_CONTROL_FLOW = {
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.map_impl,
    torch.ops.higher_order.scan,
    torch.ops.higher_order.associative_scan,
}
"""Operators that call functions of the model, such as the branches of ``torch.cond``."""


def _refuse_control_flow(program: torch.export.ExportedProgram) -> None:
    """Raise ``Refused`` if the model calls one of :data:`_CONTROL_FLOW`. No pass looks into their
    functions. Nor is a module that calls them kept whole: modes that watch what it does refuse
    them."""
    parts = (part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule))
    for node in (node for part in parts for node in part.graph.nodes):
        if node.target in _CONTROL_FLOW:
            raise Refused(
                f"the operator {node.target} calls functions that no pass looks into"
                f"{_line_of(node)}: choose by torch.where from what both branches compute; or use "
                "a plain if, or a loop, in a module of its own"
            )


def _line_of(node: fx.Node) -> str:
    """The line of the model at which a node has been recorded, to be added to a message."""
    frame = model_frame(node.stack_trace)
    return f" (at {frame['file']}:{frame['number']}: {frame['code']})" if frame else ""


def _has(model: nn.Module, name: str) -> bool:
    """Whether a tensor of an exported program is an attribute of the model."""
    try:
        operator.attrgetter(name.removeprefix("model."))(model)
    except AttributeError:
        return False
    return True


def _warn_of_hooks(model: nn.Module) -> None:
    hooked = [name for name, m in model.named_modules() if name and is_watched(model, m)]
    if hooked:
        warn(
            f"hooks on {hooked[0]!r} ({len(hooked)} such modules) will not be called: the model is "
            'traced by torch.export, whose graph calls no modules; if tracer="symbolic" can trace '
            "the model, hooks are called",
        )


class _OnTensors(nn.Module):
    """The model as a function from tensors to a list of tensors: export does not accept all types
    of arguments and outputs. ``keep`` is called with the structure of the output, and ``watched``
    gives a context in which the model runs."""

    def __init__(
        self,
        example: Example,
        keep: Callable[[Structure], None],
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.model = example.model
        self.training = example.model.training
        self.arguments = example.arguments
        self.keep, self.watched = keep, watched

    def forward(self, *inputs: Tensor) -> list[Any]:
        args, kwargs = self.arguments(inputs)
        with skip.tracking(self.model), buffers_kept(self.model), self.watched():
            outputs, structure = Structure.of(self.model(*args, **kwargs))
        self.keep(structure)
        return outputs


# The operators by which an exported graph checks what it has been specialised for.
_GUARDS = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def _runs(example: Example, traced: Traced | None = None) -> Iterator[Callable[[], Any]]:
    """Functions that run the model, or its graph, each on other inputs. They show which sizes of
    results follow from the sizes of the inputs, and which depend on values.

    The inputs have different batch sizes that the model takes: small ones, since a run may take
    long; if it takes fewer than two of these, the example's size and its double are tried as well.
    One run has the last rows, as those that come first may be as large as each other by chance.
    Where no input has a batch dimension, the values are varied in place of the size: every row then
    equals the first one, or the last.
    """
    batch = example.batch
    if batch is None:
        alike = [[_like_row(t, row) for t in example.tensors] for row in (0, -1)]
        ways = [list(example.tensors), *alike]
    else:
        ways = [example.resized(size) for size in (2, 3, 5)]
        ways += [_last_rows(example, 2)] if batch > 2 else []
    taken = [tensors for tensors in ways if _takes(example, tensors, traced)]
    if batch is not None and len(taken) < 2:
        larger = (example.resized(size) for size in sorted({max(batch, 2), 2 * batch} - {2, 3, 5}))
        taken += [tensors for tensors in larger if _takes(example, tensors, traced)]
    for tensors in taken:
        yield partial(_call, example, tensors, traced)


def _last_rows(example: Example, count: int) -> list[Tensor]:
    """The example's tensors, of as many of their last rows."""
    return [
        tensor if dim is None else tensor.narrow(dim, tensor.shape[dim] - count, count)
        for tensor, dim in zip(example.tensors, example.batch_dims, strict=True)
    ]


def _like_row(tensor: Tensor, row: int) -> Tensor:
    """A tensor of the same shape, all of whose rows are copies of the given row."""
    return tensor[row].expand_as(tensor) if tensor.ndim and len(tensor) else tensor


def _takes(example: Example, tensors: Sequence[Tensor], traced: Traced | None) -> bool:
    """Whether the model, or its graph, runs on these tensors without an error."""
    try:
        with untouched(example.model):
            _call(example, tensors, traced)
    except Exception as error:
        if not may_be_the_models(error):
            raise
        return False
    return True


def _call(example: Example, tensors: Sequence[Tensor], traced: Traced | None) -> Any:
    with parameters_put_back(example.model):
        return example.call([tensor.clone() for tensor in tensors], traced)


def _largest_batch(program: torch.export.ExportedProgram, sizes: Sizes, batch: int) -> int:
    """The largest batch that the graph is right for: of a model that branches by its batch size,
    export traces one branch only.

    Raises ``Refused`` if the graph is not right for all smaller batches of two rows or more.
    """
    largest = sys.maxsize
    for symbol, range_ in program.range_constraints.items():
        if symbol not in sizes.batch:
            continue
        upper = int(range_.upper) if range_.upper < torch.iinfo(torch.int32).max else sys.maxsize
        if range_.lower > 2 or upper < batch:
            lower = int(range_.lower)
            fewer = f"no fewer than {lower} rows"
            rows = fewer if upper == sys.maxsize else f"no others than {lower} to {upper} rows"
            raise Refused(
                "it branches on its batch size, or goes through its rows in a loop: the graph is "
                f"right for {rows}{_by_a_branch(sizes)}"
            )
        largest = min(largest, upper)
    return largest


def _has_regions_without_gradients(program: torch.export.ExportedProgram) -> bool:
    """Whether gradients are switched off, or on, for a part of the model."""
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    return any(node.target is region for node in program.graph.nodes)


def _by_a_branch(sizes: Sizes) -> str:
    """The line of the model that goes another way for two rows; "" if none is known."""
    two = dict.fromkeys(sizes.batch, 2)
    ways = (
        each.where
        for each in sizes.conditions
        if each.where and each.relation.free_symbols <= sizes.batch and not each.holds(two)
    )
    return next((f" (at {where})" for where in ways), "")


def _fixed_batch(program: torch.export.ExportedProgram, sizes: Sizes) -> str:
    """A warning that names the line where the model has made a constant of its batch size; "" if
    the batch size is still symbolic."""
    for condition in sizes.conditions:
        relation = condition.relation
        if relation.is_Equality and relation.free_symbols <= sizes.batch and condition.where:
            size = relation.args[-1]
            if size.is_Integer:
                return f"; the batch size is fixed at {size} by {condition.where}"
    return ""


def _on_the_model(
    program: torch.export.ExportedProgram,
    example: Example,
    calls: Mapping[str, whole.Opaque],
    once: Repeated,
    met: MetParameters,
) -> fx.GraphModule:
    """The graph of an exported program, whose inputs are those of the example only: it reads the
    model's own tensors under the model's own names, where the program is given them, and parameters
    that are not the model's own. It has no guards, as fxpipe has guards of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    names = iter(example.names)
    given = _given_tensors(program)
    kinds = {node: _kind(node, given) for node in program.graph.nodes}
    for node in sorted(kinds, key=lambda node: kinds[node] != "placeholder"):
        if node.target in _GUARDS:
            continue
        if kinds[node] == "placeholder":
            name = next(names)
            copies[node] = graph.create_node("placeholder", name, name=name)
        elif kinds[node] == "get_attr":
            own = given.get(node.name, str(node.target))
            target = own.removeprefix("model.")
            try:
                attributes[target] = operator.attrgetter(target)(example.model)
            except AttributeError:  # a constant, or a no_grad region: made by export
                if node.name in given:
                    attributes[target] = met.of((program.state_dict | program.constants)[own])
                else:
                    attributes[target] = operator.attrgetter(own)(program.graph_module)
            copies[node] = graph.create_node("get_attr", target, name=target.replace(".", "_"))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = _without_wrapper(node.meta)
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            copies[node].meta |= _of_autocast(node)
    once.copied(graph, attributes)
    enclose_transforms(graph, attributes)
    without_whole_slices(graph)
    # Nodes that only guards used are dead now, as are reads of a tied parameter by its other names.
    graph.eliminate_dead_code(partial(_is_needed, attributes))
    attributes |= whole.as_nodes(graph, calls, attributes)
    refuse_keywords(graph)
    return fx.GraphModule(attributes, graph, type(example.model).__name__)


def _of_autocast(node: fx.Node) -> dict[str, Any]:
    """Why a part of the model that runs under autocast is one node, and the line of the first of
    the nodes within it, for messages."""
    parts = [each for each in node.args if isinstance(each, fx.Node) and each.op == "get_attr"]
    part = operator.attrgetter(str(parts[0].target))(node.graph.owning_module)
    lines = (within.meta.get("stack_trace") for within in part.graph.nodes)
    _, _, is_enabled, *_ = node.args
    why = (
        "the model runs it under a torch.autocast of its own",
        "leave torch.autocast out of the forward, and call the pipeline under it"
        if is_enabled
        else "let less of it run so",
    )
    return {WHOLE: why, "stack_trace": next(filter(None, lines), None)}


def _given_tensors(program: torch.export.ExportedProgram) -> dict[str, str]:
    """The placeholders of an exported program that stand for parameters, buffers and constants, by
    their names, with the paths of these tensors."""
    inputs = program.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in inputs if spec.target is not None}


def _kind(node: fx.Node, given: Mapping[str, str]) -> str:
    """The kind of node that stands for a node of an exported program in the model's graph."""
    return "get_attr" if node.op == "placeholder" and node.name in given else node.op


def _is_needed(attributes: Mapping[str, Any], node: fx.Node) -> bool:
    """Whether a node has an effect, so that it must stay even if nothing uses its value. A region
    without gradients is a graph within the graph: it is needed if one of its nodes is."""
    if node.op == "call_module" or node.is_impure() or is_check(node) or _updates_statistics(node):
        return True
    within = (attributes[str(n.target)] for n in node.all_input_nodes if n.op == "get_attr")
    return any(
        inner.op != "output" and _is_needed(vars(part) | vars(part)["_modules"], inner)
        for part in within
        if isinstance(part, fx.GraphModule)
        for inner in part.graph.nodes
        if inner.op != "placeholder"
    )


_NORMS = torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a node is a norm in training mode, which writes to its buffers, the running
    statistics, although the schema of the operator does not say so."""
    if node.target not in _NORMS:
        return False
    _, _, _, mean, _, training, *_ = node.args
    return mean is not None and training is True


def _size_by_value(graph_module: fx.GraphModule, model: nn.Module) -> Blamed | None:
    """An error that blames the module in which a number or a size first depends on the values of
    tensors; None if no size does. The cut, the costs and the micro-batches need sizes that are
    known before the model runs."""
    for node in graph_module.graph.nodes:
        for sized in sized_by_values(node):
            meta = node.meta if sized is node else _without_wrapper(sized.meta)
            paths = [path for path, _ in meta.get("nn_module_stack", {}).values()]
            return Blamed(
                model.get_submodule(paths[-1]) if paths else model,
                "a number, or the size of a tensor, depends on values of tensors" + _line_of(sized),
            )
    return None


def _enclosed(traced: Traced, example: Example, unknown: Blamed) -> None:
    """Make one node of the operators whose sizes depend on values; raise ``unknown``, the error of
    :func:`_size_by_value`, if that is impossible."""
    try:
        enclose_unknown_sizes(traced.graph_module, _runs(example, traced))
    except Exception as error:
        if not may_be_the_models(error):
            raise
        # The operators cannot be one node, or the graph does not run at another batch size.
        raise unknown from None


def _without_wrapper(meta: dict[str, Any]) -> dict[str, Any]:
    """A node's metadata with the module names of the model, not of ``_OnTensors``. What names no
    module is left out: export gives that to nodes which it adds by itself, such as sizes."""
    if not meta.get("nn_module_stack"):
        return dict(meta)
    stack = {
        key: (path.removeprefix("model").removeprefix("."), kind)
        for key, (path, kind) in meta["nn_module_stack"].items()
        if path == "model" or path.startswith("model.")
    }
    return {**meta, "nn_module_stack": stack}
