"""A model's own calls of a checkpoint function: each becomes one node of the model's graph.

::

    y = torch.utils.checkpoint.checkpoint(self.block, x)        block_checkpoint(x)

While a front end traces, the checkpoint function is patched: it only calls the function that it is
given, and all nodes that are created in this call are marked. Afterwards the marked nodes are moved
into a :class:`~fxpipe.runtime.checkpointing.regions.Region`, which runs them under a checkpoint
with the options that the model has given. A reentrant checkpoint (``use_reentrant=True``) becomes a
region as well: the gradients are equal, while export, which would see its forward run under
``no_grad``, would trace a function without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn

from fxpipe.ir._torch import non_reentrant_generator
from fxpipe.ir.graph import WHOLE
from fxpipe.runtime.checkpointing import checkpoint
from fxpipe.runtime.checkpointing.checkpoint import CheckpointOptions
from fxpipe.runtime.checkpointing.regions import Region, Settings
from fxpipe.trace.patches import patched

_CUSTOM = "custom"  # the entry of a node's metadata that torch.export copies to its final graph
# Marks, in this entry: the numbers of the calls that a node has been created in, and of the calls
# that it is an argument of; outer calls come first.
_WITHIN, _GIVEN = "fxpipe_within", "fxpipe_given"
_DESCRIBE = "val", "tensor_meta", "stack_trace"  # metadata that describes the value of a node


@dataclass
class Calls:
    """The model's calls of checkpoint functions that a front end has traced."""

    graph: Callable[[], fx.Graph | None]
    """Returns the graph that the front end is writing now; None while it is writing none."""
    found: list[Settings] = field(default_factory=list)
    """The settings of each call; the number of a call is its place in this list."""
    order: list[int] = field(default_factory=list)
    """The numbers of the calls in the order in which they have ended: inner ones first."""

    @contextmanager
    def noted(self, settings: Settings, args: Sequence[Any]) -> Iterator[None]:
        """Note one call: the nodes that are created inside the ``with`` block are marked as its
        nodes, and the nodes of ``args`` as its arguments."""
        graph = self.graph()
        if graph is None:
            yield
            return
        if any(isinstance(a, Tensor) and a.is_leaf and a.requires_grad for a in args):
            # A parameter is among the arguments: gradients are recorded in every run.
            settings = replace(settings, reentrant=False)
        # Of PyTorch 2.11 the reversed list of nodes is no iterator.
        number, before = len(self.found), next(iter(reversed(graph.nodes)), None)
        self.found.append(settings)
        for node in map(_node_of, args):
            if node is not None:
                _mark(node, _GIVEN, number)
        yield
        for node in takewhile(lambda node: node is not before, reversed(graph.nodes)):
            _mark(node, _WITHIN, number)
        self.order.append(number)


def _node_of(value: Any) -> fx.Node | None:
    """The node that gives a value, if one does."""
    mode = get_proxy_mode()
    if mode is not None and isinstance(mode.tracer, PythonKeyTracer):
        value = mode.tracer.unwrap_proxy(value)
    return value.node if isinstance(value, fx.Proxy) else None


def _mark(node: fx.Node, key: str, number: int) -> None:
    custom = node.meta.get(_CUSTOM, {})
    node.meta[_CUSTOM] = {**custom, key: (number, *custom.get(key, ()))}


def _marks(node: fx.Node, key: str) -> tuple[int, ...]:
    found: tuple[int, ...] = node.meta.get(_CUSTOM, {}).get(key, ())
    return found


def graph_of_export() -> fx.Graph | None:
    """The graph that ``torch.export`` is writing now."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


_ASKED = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""The settings of a checkpoint that is not reentrant, in the order of PyTorch's arguments."""


@contextmanager
def noted(graph: Callable[[], fx.Graph | None]) -> Iterator[Calls]:
    """Yields the checkpoint calls of the model that this thread traces inside the ``with`` block,
    to which each new call is added.

    Not ``checkpoint`` is patched but the functions that it calls: the file of the model may have
    imported ``checkpoint`` by name, and would call the original.
    """
    calls = Calls(graph)

    def reentrant(original: Any) -> Any:
        def apply(_: type, function: Any, preserve: bool, *args: Any) -> Any:
            if calls.graph() is None:
                return original.__get__(None, CheckpointFunction)(function, preserve, *args)
            with calls.noted(Settings.of_reentrant(preserve), args):
                return function(*args)

        return classmethod(apply)

    def note(args: Sequence[Any], asked: Mapping[str, Any]) -> AbstractContextManager[None]:
        context_fn = asked["context_fn"]
        options = CheckpointOptions(
            asked["preserve_rng_state"],
            asked["early_stop"],
            None if context_fn is noop_context_fn else context_fn,
            asked["determinism_check"],
            asked["debug"],
            writes_again=True,
        )
        return calls.noted(Settings(options), args)

    def non_reentrant(original: Any) -> Any:
        def generate(function: Any, *options: Any, **kwargs: Any) -> Iterator[None]:
            if calls.graph() is None:
                yield from original(function, *options, **kwargs)
                return
            *asked, args = *options[: len(_ASKED)], options[len(_ASKED) :]
            with note((*args, *kwargs.values()), dict(zip(_ASKED, asked, strict=True))):
                yield

        return generate

    def non_reentrant_by_name(original: Any) -> Any:
        def generate(function: Any, args: Any, kwargs: Any, **asked: Any) -> Iterator[None]:
            if calls.graph() is None:
                yield from original(function, args, kwargs, **asked)
                return
            with note((*args, *kwargs.values()), asked):
                yield

        return generate

    def ours(original: Any) -> Any:
        def checkpointed(
            function: Any, *args: Any, options: CheckpointOptions | None = None, **kwargs: Any
        ) -> Any:
            if calls.graph() is None:
                return original(function, *args, options=options, **kwargs)
            settings = Settings(options or CheckpointOptions())
            with calls.noted(settings, (*args, *kwargs.values())):
                return function(*args, **kwargs), None

        return checkpointed

    generator, is_by_name = non_reentrant_generator()
    replacement = non_reentrant_by_name if is_by_name else non_reentrant
    with (
        patched(CheckpointFunction, "apply", reentrant),
        patched(torch.utils.checkpoint, generator, replacement),
        patched(checkpoint, "checkpointed", ours),
    ):
        yield calls


@contextmanager
def with_any_backward() -> Iterator[None]:
    """Inside the ``with`` block reentrant checkpoints allow ``torch.autograd.grad``, which
    PyTorch's implementation refuses: they run as regions do."""

    def replace(_: Any) -> Any:
        def apply(_: type, function: Any, preserve: bool, *args: Any) -> Any:
            return Settings.of_reentrant(preserve).run(function, *args)

        return classmethod(apply)

    with patched(CheckpointFunction, "apply", replace):
        yield


# ------------------------------------------------------------------------------------ in the graph


def enclose(gm: fx.GraphModule, calls: Calls) -> None:
    """Make each checkpoint call one node, which calls a region. The nodes of a call in which sizes
    depend on values stay as they are, without a checkpoint."""
    for number in calls.order:
        nodes = _of_call(gm.graph, number)
        if nodes and not any(free_unbacked_symbols(n.meta.get("val")) for n in nodes):
            _enclose(gm, nodes, number, calls.found[number])
    if calls.found:
        gm.recompile()


def _of_call(graph: fx.Graph, number: int) -> list[fx.Node]:
    """The nodes of a call: those between the first marked one and the last, since a front end may
    have inserted nodes without a mark."""
    work = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    marked = [i for i, n in enumerate(work) if number in _marks(n, _WITHIN)]
    return work[marked[0] : marked[-1] + 1] if marked else []


def _enclose(gm: fx.GraphModule, nodes: Sequence[fx.Node], number: int, settings: Settings) -> None:
    graph, enclosed, inside = gm.graph, set(nodes), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given = [n for n in graph.nodes if number in _marks(n, _GIVEN) and n not in enclosed]
    inputs = dict.fromkeys(
        source
        for source in (*given, *(s for node in nodes for s in node.all_input_nodes))
        if source not in enclosed and (source.op != "get_attr" or source in given)
    )
    for source in inputs:
        copies[source] = inside.placeholder(source.name)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # a parameter or a buffer
                copies[source] = inside.node_copy(source)
        copies[node] = inside.node_copy(node, copies.__getitem__)
    results = [node for node in nodes if not enclosed.issuperset(node.users)]
    values = [copies[node] for node in results]
    inside.output(values[0] if len(values) == 1 else tuple(values))

    last = nodes[-1]
    stack = _common_stack(nodes)
    path = [path for path, _ in stack.values()][-1:] or [""]
    with graph.inserting_after(last):
        name = f"{path[0].replace('.', '_')}_checkpoint".lstrip("_")
        node = graph.create_node("call_module", name, tuple(inputs), name=name)
    node.target = node.name  # fx has made the name unique
    node.meta = {"nn_module_stack": stack, "stack_trace": nodes[0].meta.get("stack_trace")}
    node.meta[WHOLE] = "the model checkpoints it", "checkpoint smaller parts of it, each by itself"
    places = map(list(inputs).index, given or inputs)
    body = fx.GraphModule(gm, inside, node.name)
    gm.add_submodule(node.name, Region(body, settings, tuple(places)))
    outer = min((marks for n in nodes if (marks := _marks(n, _WITHIN))), key=len)[:-1]
    node.meta[_CUSTOM] = {_WITHIN: outer}
    at = node
    for i, result in enumerate(results):
        value = node
        if len(results) > 1:
            with graph.inserting_after(at):
                at = value = graph.call_function(getitem, (node, i))
        value.meta |= {key: result.meta[key] for key in _DESCRIBE if key in result.meta}
        value.meta[_CUSTOM] = {_WITHIN: outer, _GIVEN: _marks(result, _GIVEN)}
        result.replace_all_uses_with(value, delete_user_cb=lambda user: user not in enclosed)
    for each in reversed(nodes):
        graph.erase_node(each)


def _common_stack(nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """The part of ``nn_module_stack`` that all of the nodes share, from the model inwards."""
    stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in nodes]
    common = takewhile(
        lambda items: all(item == items[0] for item in items), zip(*stacks, strict=False)
    )
    return dict(items[0] for items in common)
