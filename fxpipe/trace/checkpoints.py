"""The checkpoints that a model has itself: each becomes one node of its graph.

::

    y = torch.utils.checkpoint.checkpoint(self.block, x)        block_checkpoint(x)

While a front end traces, PyTorch's function calls what it is given, and the nodes that this makes
are marked. Afterwards the marked nodes are moved into a :class:`~fxpipe.runtime.regions.Region`,
which is run as the model has asked for. A checkpoint of the old kind (``use_reentrant=True``)
becomes the same: its gradients are equal, and export would take its forward for one without
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from fxpipe.ir.graph import WHOLE
from fxpipe.runtime import checkpoint
from fxpipe.runtime.checkpoint import CheckpointOptions
from fxpipe.runtime.regions import Region, Settings
from fxpipe.trace.patches import patched

_CUSTOM = "custom"  # what is in there export keeps
_WITHIN, _GIVEN = "fxpipe_within", "fxpipe_given"  # the numbers of checkpoints, outer ones first
_DESCRIBE = "val", "tensor_meta", "stack_trace"


@dataclass
class Calls:
    """The calls of checkpoints that a front end has come by; ``graph``: that it writes now."""

    graph: Callable[[], fx.Graph | None]
    found: list[Settings] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # in which they have ended: inner ones first

    @contextmanager
    def noted(self, settings: Settings, args: Sequence[Any]) -> Iterator[None]:
        """Mark the nodes that are made meanwhile as those of one call."""
        graph = self.graph()
        if graph is None:
            yield
            return
        if any(isinstance(a, Tensor) and a.is_leaf and a.requires_grad for a in args):
            settings = replace(settings, reentrant=False)  # it certainly has gradients
        number, before = len(self.found), next(reversed(graph.nodes), None)
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


@contextmanager
def noted(graph: Callable[[], fx.Graph | None]) -> Iterator[Calls]:
    """Yields the calls of checkpoints in the model that this thread traces, which grow.

    What is patched is what ``checkpoint`` itself calls: a model has imported the function by then.
    """
    calls = Calls(graph)

    def reentrant(original: Any) -> Any:
        def apply(_: type, function: Any, preserve: bool, *args: Any) -> Any:
            if calls.graph() is None:
                return original.__get__(None, CheckpointFunction)(function, preserve, *args)
            with calls.noted(Settings.of_reentrant(preserve), args):
                return function(*args)

        return classmethod(apply)

    def non_reentrant(original: Any) -> Any:
        def generate(function: Any, *options: Any, **kwargs: Any) -> Iterator[None]:
            if calls.graph() is None:
                yield from original(function, *options, **kwargs)
                return
            preserve, context_fn, determinism_check, debug, early_stop, *args = options
            asked = CheckpointOptions(
                preserve,
                early_stop,
                None if context_fn is noop_context_fn else context_fn,
                determinism_check,
                debug,
                writes_again=True,
            )
            with calls.noted(Settings(asked), (*args, *kwargs.values())):
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

    with (
        patched(CheckpointFunction, "apply", reentrant),
        patched(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", non_reentrant),
        patched(checkpoint, "checkpointed", ours),
    ):
        yield calls


@contextmanager
def with_any_backward() -> Iterator[None]:
    """Reentrant checkpoints are run so that ``torch.autograd.grad`` goes through them; PyTorch's
    refuse to."""

    def replace(_: Any) -> Any:
        def apply(_: type, function: Any, preserve: bool, *args: Any) -> Any:
            return Settings.of_reentrant(preserve).run(function, *args)

        return classmethod(apply)

    with patched(CheckpointFunction, "apply", replace):
        yield


# ------------------------------------------------------------------------------------ in the graph


def enclose(gm: fx.GraphModule, calls: Calls) -> None:
    """Make each call of a checkpoint one node, which calls a region."""
    for number in calls.order:
        nodes = _of_call(gm.graph, number)
        if nodes and not any(free_unbacked_symbols(n.meta.get("val")) for n in nodes):
            _enclose(gm, nodes, number, calls.found[number])
    if calls.found:
        gm.recompile()


def _of_call(graph: fx.Graph, number: int) -> list[fx.Node]:
    """The nodes of a call; with those between them that have come there without a mark."""
    work = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    marked = [i for i, n in enumerate(work) if number in _marks(n, _WITHIN)]
    return work[marked[0] : marked[-1] + 1] if marked else []


def _enclose(gm: fx.GraphModule, nodes: Sequence[fx.Node], number: int, settings: Settings) -> None:
    graph, own, inside = gm.graph, set(nodes), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given = [n for n in graph.nodes if number in _marks(n, _GIVEN) and n not in own]
    inputs = dict.fromkeys(
        source
        for source in (*given, *(s for node in nodes for s in node.all_input_nodes))
        if source not in own and (source.op != "get_attr" or source in given)
    )
    for source in inputs:
        copies[source] = inside.placeholder(source.name)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # a parameter or a buffer
                copies[source] = inside.node_copy(source)
        copies[node] = inside.node_copy(node, copies.__getitem__)
    results = [node for node in nodes if not own.issuperset(node.users)]
    values = [copies[node] for node in results]
    inside.output(values[0] if len(values) == 1 else tuple(values))

    last = nodes[-1]
    stack = _common_stack(nodes)
    path = [path for path, _ in stack.values()][-1:] or [""]
    with graph.inserting_after(last):
        name = f"{path[0].replace('.', '_')}_checkpoint".lstrip("_")
        node = graph.create_node("call_module", name, tuple(inputs), name=name)
    node.target = node.name  # which is unique
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
        result.replace_all_uses_with(value, delete_user_cb=lambda user: user not in own)
    for each in reversed(nodes):
        graph.erase_node(each)


def _common_stack(nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """The modules that all of the nodes are in."""
    stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in nodes]
    common = takewhile(
        lambda items: all(item == items[0] for item in items), zip(*stacks, strict=False)
    )
    return dict(items[0] for items in common)
