"""Modules that are kept whole: what ``torch.export`` cannot look into stays one node of the graph.

A module whose forward branches by the values of its inputs (a mixture of experts that loops over
the experts that were hit, say) cannot be traced. It need not be: the rest of the model can, with a
call of that module as one node of the graph. To trace the rest, export has to know the shapes of
the module's outputs. These are learned beforehand, by running the model at several batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import CALL, FakeTensor
from fxpipe.ir.graph import WHOLE
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.load import Counting, Load
from fxpipe.ir.stand_in import Output, StandIn
from fxpipe.ir.structure import Structure
from fxpipe.ir.tensors import devices_of, memory_of
from fxpipe.runtime.checkpointing.module_effects import WatchesWrites, copied_ahead
from fxpipe.runtime.random import HostRandomState, RandomState
from fxpipe.runtime.shared import assigned_to_both
from fxpipe.runtime.uses import uses_summed
from fxpipe.runtime.writes import WrittenMemory, writes_counted
from fxpipe.trace.blame import NotWhole
from fxpipe.trace.casts import autocasts
from fxpipe.trace.containers import CHANGES, Contents, checked

WITHOUT_VALUES = "compute it in several modules, or with masks and torch.where in place of values"
"""Advice for the user, where a part of the model is one node since it depends on values."""

BACKWARD = 2
"""A backward is taken for so many times its forward, as it computes gradients of inputs and of
parameters."""

_LOOK_AT_MASKS = {nn.TransformerEncoder: "is_causal", nn.TransformerDecoder: "tgt_is_causal"}
"""Layers of PyTorch that compare the values of a mask with those of a causal one, unless they are
told by this argument whether it is one."""


@dataclass(frozen=True)
class _ShapeRule:
    """The shape of an output as a rule: how its sizes follow from the sizes of the inputs."""

    sizes: tuple[Any, ...]  # each is a number, or (input, dimension, factor)
    dtype: torch.dtype
    requires_grad: bool

    def of(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The output's sizes for these inputs."""
        return [
            size if isinstance(size, int) else inputs[size[0]].shape[size[1]] * size[2]
            for size in self.sizes
        ]


@dataclass(frozen=True)
class _WorkRule:
    """An amount of work of a call as a rule, for any batch size: so much in all (``fixed``), and so
    much for each row (``each``), of which there are as many as an input (``along``) is large in one
    of its dimensions; None: what an input has to do with it is not known."""

    fixed: float
    each: float
    along: tuple[int, int] | None

    @staticmethod
    def from_runs(
        shapes: Sequence[Sequence[torch.Size]], amounts: Sequence[int], *, is_even: bool = False
    ) -> _WorkRule:
        """The rule that holds for the mean of these runs: the shapes of the inputs of each, and its
        amount of work. If ``is_even`` all of it is in proportion to the rows."""
        mean = sum(amounts) / len(amounts)
        for i, shape in enumerate(shapes[0]):
            for dim in range(len(shape)):
                rows = [given[i][dim] for given in shapes]
                if len(set(rows)) > 1:
                    middle = sum(rows) / len(rows)
                    most = mean / middle
                    each = most if is_even else min(max(_slope(rows, amounts), 0.0), most)
                    return _WorkRule(mean - each * middle, each, (i, dim))
        return _WorkRule(mean, 0.0, None)

    def of(self, inputs: Sequence[Tensor]) -> int:
        """The amount of work that a call with these inputs is expected to do."""
        rows = 0 if self.along is None else inputs[self.along[0]].shape[self.along[1]]
        return round(self.fixed + self.each * rows)


def _slope(rows: Sequence[int], amounts: Sequence[int]) -> float:
    """By how much amounts grow with each row, by least squares."""
    middle, mean = sum(rows) / len(rows), sum(amounts) / len(amounts)
    apart = [number - middle for number in rows]
    pairs = zip(apart, amounts, strict=True)
    return sum(x * (y - mean) for x, y in pairs) / sum(x * x for x in apart)


@dataclass(frozen=True)
class _ObservedCall:
    """What has been observed of one call of a module, in a run at one batch size."""

    inputs: Structure
    outputs: Structure
    given: list[torch.Size]  # shapes of the inputs
    made: list[Tensor]  # the outputs, as tensors on "meta"
    written: tuple[str, ...]  # parameters and buffers that the call wrote to
    statistics: tuple[str, ...]  # of these, the running statistics of norms
    draws: bool  # whether it drew random numbers
    draws_on_the_host: bool  # whether Python or NumPy drew them
    work: tuple[int, int, int]  # its FLOPs, the bytes that were moved, and its operators
    takes_views: bool  # whether it could be called with views in place of its parameters


@dataclass(frozen=True)
class Call:
    """One call of a module that is kept whole: the structures that its input and output tensors are
    in, and the shapes of its outputs, as rules that hold for any batch size."""

    module: nn.Module
    inputs: Structure
    outputs: Structure
    shapes: list[_ShapeRule]
    written: tuple[str, ...]  # parameters and buffers that the call writes to
    statistics: tuple[str, ...]  # of these, the running statistics of norms
    draws: bool  # whether it draws random numbers
    draws_on_the_host: bool  # whether Python or NumPy draws them
    work: tuple[_WorkRule, _WorkRule, _WorkRule]  # for FLOPs, bytes and operators
    takes_views: bool  # whether it can be called with views in place of its parameters

    @staticmethod
    def of(module: nn.Module, runs: Sequence[_ObservedCall]) -> Call:
        """Derive the rules from runs of the same call at several batch sizes.

        Raises NotWhole if the outputs do not follow from the inputs by a rule.
        """
        first = runs[0]
        for run in runs[1:]:
            if not (first.inputs.fits(run.inputs) and first.outputs.fits(run.outputs)):
                raise NotWhole(
                    module, "its inputs or outputs are nested otherwise at another batch size"
                )
        known = first.inputs.constants()
        for number in _numbers(first.outputs):
            if number not in known:
                raise NotWhole(
                    module,
                    f"{number} is among its outputs, which may depend on values of tensors: return "
                    "a tensor in its place",
                )
        given = [run.given for run in runs]
        shapes = []
        for made in zip(*(run.made for run in runs), strict=True):
            seen = zip(*(tensor.shape for tensor in made), strict=True)
            sizes = tuple(_size(each, given) for each in seen)
            if None in sizes:
                raise NotWhole(
                    module,
                    "the sizes of its outputs depend on more than the sizes of its inputs; pad "
                    "them to a fixed size, in a module of its own that has all of this (with "
                    "packed sequences: that packs them, and pads what comes of them by "
                    "pad_packed_sequence(y, batch_first=True, total_length=x.shape[1]); as each "
                    "length is compiled by itself then, pad x to few lengths, such as multiples of "
                    "64)",
                )
            shapes.append(_ShapeRule(sizes, made[0].dtype, made[0].requires_grad))
        draws = any(run.draws for run in runs), any(run.draws_on_the_host for run in runs)
        flops, sizes, operators = zip(*(run.work for run in runs), strict=True)
        work = (
            _WorkRule.from_runs(given, flops, is_even=True),
            _WorkRule.from_runs(given, sizes),
            _WorkRule.from_runs(given, operators),
        )
        written = first.written, first.statistics
        takes_views = all(run.takes_views for run in runs)
        return Call(
            module, first.inputs, first.outputs, shapes, *written, *draws, work, takes_views
        )

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised outputs, of the shapes and dtypes that these inputs lead to."""
        device = tensors[0].device
        return [torch.empty(s.of(tensors), dtype=s.dtype, device=device) for s in self.shapes]

    def node(self, graph: fx.Graph, key: str, inputs: Sequence[fx.Node]) -> fx.Node:
        """A call of the module in a graph, whose module is called ``key``."""
        return graph.call_module(key, tuple(inputs))


def _numbers(outputs: Structure) -> list[int | float]:
    """The numbers among outputs, which a graph would freeze as constants. Flags are left out."""
    return [c for c in outputs.constants() if isinstance(c, int | float) and type(c) is not bool]


def _size(seen: Sequence[int], given: Sequence[Sequence[torch.Size]]) -> Any:
    """The rule for one size of an output, from its values in several runs (``seen``) and the shapes
    of the inputs in each (``given``): a number, or (input, dimension, factor). None if no rule
    fits."""
    if len(set(seen)) == 1:
        return seen[0]
    for i, shape in enumerate(given[0]):
        for dim in range(len(shape)):
            times, rest = divmod(seen[0], max(shape[dim], 1))
            if not rest and all(
                size == times * shapes[i][dim] for size, shapes in zip(seen, given, strict=True)
            ):
                return i, dim, times
    return None


class Whole(WatchesWrites):
    """A module that is kept whole, as a function from tensors to a list of tensors.

    On fake tensors the module does not run, since it depends on values. What comes out instead has
    the outputs' shapes and a history for autograd, and has the same side effects: it writes to the
    parameters and buffers that the module writes to, and draws random numbers if the module does.
    As much work is counted for it as the module has done for a row when it was observed.

    How often the module uses a parameter depends on values, too. The gradients of all uses in one
    call are added up before they are added to those of other calls.

    Raises RuntimeError where the module's outputs have another structure than in the trace, or
    other shapes than the rules give.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.module, self.seen = call.module, call
        self.draws_on_the_host = call.draws_on_the_host  # asked for by pass "alias"
        self.statistics = call.statistics  # asked for by pass "batch_norm"

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._pretend(tensors)
        with (
            copied_ahead(self.module),
            assigned_to_both(self.seen.module, self.module),
            uses_summed(self.module, self.seen.takes_views) as views,
        ):
            args, kwargs = self.seen.inputs.fill([views.of(tensor) for tensor in tensors])
            outputs, structure = Structure.of(checked(self.module, args, kwargs))
        if not self.seen.outputs.fits(structure):
            raise RuntimeError(
                f"{type(self.module).__name__} gave an output of another structure than when it "
                "was traced: the structure depends on the values of the inputs, and a graph needs "
                "to know it ahead"
            )
        for output, shape in zip(outputs, self.seen.shapes, strict=True):
            if list(output.shape) != shape.of(tensors):
                raise RuntimeError(
                    f"{type(self.module).__name__} gave a tensor of shape {tuple(output.shape)} in "
                    f"place of {tuple(shape.of(tensors))}: how large it is depends on the values "
                    "of the inputs, and a graph needs to know it ahead: pad it to a fixed size, or "
                    "give the size to the model as an argument, an int"
                )
        # To the graph the outputs are new tensors, so that an alias of an input has to be copied.
        memory = {memory_of(tensor) for tensor in tensors}
        results = map(views.as_result, outputs)
        return [t.clone() if memory_of(t) in memory else t for t in results]

    def _pretend(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        own = _tensors(self.module)
        with torch.no_grad():
            for name in self.seen.written:
                own[name].copy_(own[name].clone())
        if self.seen.draws:
            torch.rand(())
        outputs = [
            Output(tuple(shape.of(tensors)), shape.dtype, shape.requires_grad)
            for shape in self.seen.shapes
        ]
        flops, size, operators = (rule.of(tensors) for rule in self.seen.work)
        work = Load(flops, size, operators)
        sources = list(tensors)
        if any(output.requires_grad for output in outputs):
            sources += (own for own in self.parameters() if own.requires_grad)
        stand_in = StandIn(outputs, work, work.times(BACKWARD))
        return stand_in.call(sources)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---------------------------------------------------------------------------------- while exporting


class Opaque(Protocol):
    """A call that export does not look into, and that becomes one node of the graph: of a module
    that is kept whole, or of an autograd Function."""

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised tensors of the outputs' shapes and dtypes, for these inputs."""

    def node(self, graph: fx.Graph, key: str, inputs: Sequence[fx.Node]) -> fx.Node:
        """The node that stands for the call in ``graph``; its value is a list of tensors."""


_calls: ContextVar[Mapping[str, Opaque]] = ContextVar("calls")
"""The calls of the export that is going on, by key. The fake kernel of the operator below finds
its call here, as an operator can be given no more than tensors and a string."""


@torch.library.custom_op(
    "fxpipe::whole", mutates_args=(), schema="(Tensor[] inputs, str key) -> Tensor[]"
)
def whole(inputs: list[Tensor], key: str) -> list[Tensor]:
    """Stands for a call that export does not look into, while the graph is being exported."""
    raise NotImplementedError("stands in a graph for a call, and is never run")


@whole.register_fake
def _(inputs: list[Tensor], key: str) -> list[Tensor]:
    return _calls.get()[key].like(inputs)


OP = torch.ops.fxpipe.whole.default


@contextmanager
def standing_in(paths: Mapping[nn.Module, str], stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside the ``with`` block ``stand_in(module, forward, key, args, kwargs)`` is called in place
    of the forward of each of these modules; if a module has hooks, also in place of the hooks.

    ``forward`` is the module's original method. ``key`` tells the calls apart: it is the module's
    path and, from the second call on, a number.
    """
    counts = dict.fromkeys(paths.values(), 0)
    names = {module: CALL if has_hooks(module) else "forward" for module in paths}

    def replaced(module: nn.Module, path: str) -> Callable[..., Any]:
        original = getattr(module, names[module])

        def forward(*args: Any, **kwargs: Any) -> Any:
            counts[path] += 1
            key = path if counts[path] == 1 else f"{path}_{counts[path]}"
            return stand_in(module, original, key, args, kwargs)

        return forward

    before = {module: vars(module).get(name) for module, name in names.items()}
    for module, path in paths.items():
        vars(module)[names[module]] = replaced(module, path)
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del vars(module)[names[module]]
            else:
                vars(module)[names[module]] = forward


def seen(paths: Mapping[nn.Module, str], runs: Iterable[Callable[[], Any]]) -> dict[str, Call]:
    """All calls of these modules by key, as observed in ``runs`` of the model, each of which has
    another batch size.

    Raises:
        NotWhole: if the outputs of a call do not follow from its inputs by a rule, if it writes to
            its inputs, or if the number of calls depends on the batch size.
    """
    found: dict[str, list[_ObservedCall]] = {}
    modules: dict[str, nn.Module] = {}
    count = 0

    def watched(module: nn.Module, forward: Any, key: str, args: Any, kwargs: Any) -> Any:
        given, inputs = Structure.of((args, kwargs))
        own = _tensors(module)
        tensors = (*given, *own.values())
        before = list(map(writes_counted, tensors))
        state, host = RandomState(devices_of(tensors)), HostRandomState()
        contents = Contents((args, kwargs))
        output, work, memory, takes_views = _run(module, lambda: forward(*args, **kwargs))
        if contents.have_changed():
            raise NotWhole(module, f"it {CHANGES}")
        written = [
            memory.has(tensor) or writes_counted(tensor) != version
            for tensor, version in zip(tensors, before, strict=True)
        ]
        if any(written[: len(given)]):
            raise NotWhole(
                module,
                "it writes to its inputs: let it compute a new tensor, as x = x * 2 in place of "
                "x.mul_(2)",
            )
        made, outputs = Structure.of(output)
        found.setdefault(key, []).append(
            _ObservedCall(
                inputs,
                outputs,
                [tensor.shape for tensor in given],
                [t.detach().to("meta").requires_grad_(t.requires_grad) for t in made],
                tuple(compress(own, written[len(given) :])),
                tuple(name for name, t in own.items() if memory_of(t) in memory.statistics),
                state.has_changed or host.has_changed,
                host.has_changed,
                (work.flops, work.bytes, work.operators),
                takes_views,
            )
        )
        modules[key] = module
        return output

    for run in runs:
        count += 1
        with standing_in(paths, watched):
            run()
    for key, each in found.items():
        if len(each) != count:
            raise NotWhole(modules[key], "how often it is called depends on the batch size")
    return {key: Call.of(modules[key], each) for key, each in found.items()}


def _run(module: nn.Module, call: Callable[[], Any]) -> tuple[Any, Load, WrittenMemory, bool]:
    """Call a module; return what it gives, its work, the memory that it writes to, and whether it
    takes views in place of its parameters.

    It does not if it fails with them, as one does that freezes its parameters, or if it switches
    autocast on.
    """

    def run(takes_views: bool) -> tuple[Any, Load, WrittenMemory, bool]:
        work = Load()
        with (
            autocasts() as found,
            uses_summed(module, takes_views),
            Counting(work),
            WrittenMemory() as memory,
        ):
            output = call()
        return output, work, memory, takes_views and not found

    try:
        return run(takes_views=True)
    except Exception:
        return run(takes_views=False)


@contextmanager
def kept_whole(paths: Mapping[nn.Module, str], calls: Mapping[str, Opaque]) -> Iterator[None]:
    """Inside the ``with`` block export records calls of these modules as one operator each, and
    does not look into them.

    Args:
        paths: the modules that are kept whole, with their paths.
        calls: the calls of these modules, as observed before. The operators of other calls, which
            are entered in ``calls`` during the export, are looked up in it as well.
    """

    def call(module: nn.Module, _: Any, key: str, args: Any, kwargs: Any) -> Any:
        tensors, structure = Structure.of((args, kwargs))
        known = calls.get(key)
        if not isinstance(known, Call) or not known.inputs.fits(structure):
            raise NotWhole(
                module, "it is called with other arguments than when its shapes were learned"
            )
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise NotWhole(
                module, "it is given a number that depends on values of tensors, or no tensor"
            )
        return known.outputs.fill(OP(tensors, key))

    token = _calls.set(calls)
    try:
        with standing_in(paths, call):
            yield
    finally:
        _calls.reset(token)


def next_modules_to_keep(
    model: nn.Module, paths: Mapping[nn.Module, str], module: nn.Module | None
) -> dict[nn.Module, str] | None:
    """The modules to keep whole in the next attempt, after an export has failed in ``module``.

    These are the modules kept whole so far (``paths``), the one that failed, and all others of its
    class, since they are likely to fail too. If the one that failed is kept whole already, is a
    part of a module that is, or is a mere container such as ``nn.ModuleList``, its parent is taken
    in its place. None if that is the model itself.
    """
    names = {module: name for name, module in model.named_modules()}
    kept = tuple(f"{path}." for path in paths.values())
    module = module if module in names else None
    while module is not None and (f"{names[module]}.".startswith(kept) or _is_container(module)):
        parent = names[module].rpartition(".")[0]
        module = model.get_submodule(parent) if parent else None
    if module is None or module is model:
        return None
    chosen = {name for m, name in names.items() if m in paths or type(m) is type(module)}
    return {
        m: name
        for m, name in names.items()
        if name in chosen and not any(name.startswith(f"{outer}.") for outer in chosen)
    }


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _advice(module: nn.Module) -> str:
    """Advice for the user on a module that depends on values."""
    for part in module.modules():
        for kind, argument in _LOOK_AT_MASKS.items():
            if isinstance(part, kind):
                return (
                    f"a {kind.__name__} looks at the values of a mask unless {argument}=True, or "
                    f"False, is given with it; else {WITHOUT_VALUES}"
                )
    return WITHOUT_VALUES


def as_nodes(
    graph: fx.Graph, calls: Mapping[str, Opaque], attributes: Mapping[str, Any]
) -> dict[str, Whole]:
    """Replace the operator in an exported graph by the calls that it stands for; return the modules
    that the new nodes call, by key.

    A region without gradients is a graph within the graph, an attribute that ``graph`` reads. Its
    operators are replaced as well, and the modules that it then calls are added to it::

        x ── wrap_with_set_grad_enabled(False, submod_1, x)    submod_1: x ── whole([x], "vision")
                                                          ↓
                                                               submod_1: x ── vision(x)
    """
    nodes = graph.find_nodes(op="call_function", target=OP)
    seen_here = {key: calls[key] for _, key in (node.args for node in nodes)}
    used = {key: Whole(call) for key, call in seen_here.items() if isinstance(call, Call)}
    if graph.owning_module is not None:  # only modules of the owner may be called in its graph
        for key, module in used.items():
            graph.owning_module.add_submodule(key, module)
    for node in nodes:
        inputs, key = node.args
        with graph.inserting_before(node):
            call = calls[key].node(graph, key, inputs)
        call.meta = dict(node.meta)
        if key in used:
            advice = _advice(used[key].seen.module)
            call.meta[WHOLE] = "what it does depends on values of tensors", advice
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        region = attributes.get(str(node.target))
        if isinstance(region, fx.GraphModule):
            as_nodes(region.graph, calls, dict(region.named_children()))
            region.recompile()
    return used
