"""The front end that is tried first: ``torch.fx``'s symbolic tracing.

It keeps the model's own modules, and leaves every size symbolic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import skip
from fxpipe.ir._torch import ASSERT
from fxpipe.ir.checks import check
from fxpipe.ir.graph import MADE
from fxpipe.ir.hooks import has_hooks, is_recorded, is_watched
from fxpipe.ir.log import warn
from fxpipe.ir.source import is_of_a_model
from fxpipe.ir.structure import Structure
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.state import State
from fxpipe.trace import checkpoints
from fxpipe.trace.asked import questions_answered
from fxpipe.trace.conditions import as_a_check
from fxpipe.trace.containers import Unchanging, has_containers, unchanging
from fxpipe.trace.errors import GRADIENTS, Refused, line_of_the_model
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.folded import Folded, computed_with
from fxpipe.trace.functions import as_callable
from fxpipe.trace.isolation import buffers_kept, parameters_put_back, untouched
from fxpipe.trace.keywords import refuse_keywords
from fxpipe.trace.lines import running_lines
from fxpipe.trace.on_meta import told_somewhere
from fxpipe.trace.patches import functions_handled, fx_here, prints
from fxpipe.trace.proxies import Proxy


def front_end(example: Example) -> Traced:
    model = example.model
    for module, path in example.whole.items():
        if State(module.modules()).has_tensors():
            raise Refused(
                f"{path} has tensors among its state, and only torch.export can keep it whole then"
            )
    tracer = _SymbolicTracer(example)
    # ``untouched`` removes the constants that fx leaves on the model as attributes.
    with (
        untouched(model) as since,
        parameters_put_back(model) as written,
        questions_answered(model, tracer.real),
        fx_here(),
        functions_handled(_as_a_node),
        skip.tracking(model),
        checkpoints.noted(lambda: tracer.graph) as calls,
        told_somewhere(example),
        prints() as printed,
    ):
        graph = tracer.trace(model)
        graph.output_node().type = None  # the annotation of the tracer's function, not the model's
        if since.drew_random_numbers():
            raise Refused(
                "it draws random numbers that do not depend on its inputs: fx freezes them"
            )
        for name, write in written.items():
            raise Refused(
                f"it writes to its parameter {name} (by {write.where}) while it is traced, so that "
                "the graph does not write to it"
            )
        if tracer.folded.trained:
            raise Refused(
                "it computes with parameters that it does not get by their names (but from "
                "parameters(), say, or out of a list), which fx would do once, without gradients"
            )
        if tracer.unseen:
            raise Refused(tracer.unseen)
        if tracer.folded.writes:
            raise Refused(
                "it writes in place to a tensor that is none of its buffers and parameters, which "
                "fx takes for a constant"
            )
        refuse_keywords(graph)
        graph_module = fx.GraphModule(model, graph, type(model).__name__)
        _check_containers(graph_module)
        checkpoints.enclose(graph_module, calls)
    traced = Traced(graph_module, "symbolic", example.binder(), tracer.rebuild)
    traced.folded, traced.prints = tracer.folded.tensors, printed
    return traced


_BACKWARDS = torch.autograd.grad, torch.autograd.backward, "backward"
_OF_LAYERS = nn.Transformer | nn.TransformerEncoder | nn.TransformerDecoder


class _SymbolicTracer(fx.Tracer):
    """fx's tracer, with one placeholder for each tensor of the example; the other arguments are
    constants.

    The option ``concrete_args`` of fx would make arguments constants as well, but it leaves
    placeholders and assertions behind for them.
    """

    # Without it, what a model computes from a buffer would be computed once, during the trace.
    proxy_buffer_attributes = True

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.example = example
        model, modules = example.model, list(example.model.modules())
        self.watched = {module for module in modules if is_watched(model, module)}
        for name, module in model.named_modules():
            if module in self.watched and is_recorded(model, module):
                warn(
                    f"hooks on {name!r} will not be called, except those that record what the "
                    "model gives: the module is traced into, so that these are called",
                )
        self.rebuild: Callable[[Any], Any] = lambda output: output
        self.folded = Folded()
        self.unseen = ""  # what the model has done with a value that fx does not see, and where
        state = model.named_parameters, model.named_buffers
        self.own = dict(each for named in state for each in named(remove_duplicate=False))
        self.given: dict[str, Tensor] = {}  # the inputs, by the names of their placeholders
        self.modes = Ambient.here()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node, and is not looked into.

        A module with hooks becomes one node, so that its hooks are called with it; hooks that
        record what the model gives are called during the trace instead. So does a module that
        changes a state of its own, and so do PyTorch's modules, except ``nn.Sequential`` and
        transformers: one may want to cut between their layers. A module that has a tensor as a
        plain attribute (a layer whose weight has been replaced by one) is looked into, too, since
        such a tensor is none of the parameters and buffers that a node of a module has.
        """
        is_whole = super().is_leaf_module(m, module_qualified_name)
        is_whole &= not any(isinstance(value, Tensor) for value in vars(m).values())
        if has_hooks(m):  # ``untouched`` has left only hooks that record what the model gives
            return False
        is_kept = m in self.watched or m in self.example.whole
        return is_kept or (is_whole and not isinstance(m, _OF_LAYERS))

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(m, torch.jit.ScriptModule):
            raise Refused(f"{self.path_of_module(m)} is compiled to TorchScript")
        return super().call_module(m, forward, args, kwargs)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any
    ) -> fx.Node:
        if Ambient.here() != self.modes:
            raise Refused(
                "it switches gradients or autocast on or off within its forward, which fx does "
                "not see"
            )
        if target is ASSERT:
            args, kwargs = as_a_check(*args, **kwargs), {}
            target = check
        if _is_the_models(target) and has_containers((*args, *kwargs.values())):
            target = unchanging(target)
        written = _written_by(target, args, kwargs)
        for each in written if isinstance(written, list | tuple) else [written]:
            if isinstance(each, fx.Node) and each.op == "get_attr":
                self.folded.writes |= each.target not in self.own
        node = super().create_node(kind, target, args, kwargs, *more, **options)
        if node.target in _BACKWARDS:
            raise Refused(GRADIENTS)
        node.stack_trace = running_lines()
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def real(self, value: Any) -> Any:
        """The tensor for which a proxy stands, if it is an input or a tensor of the model; any
        other object as it is. Raises ``Refused`` for a proxy of what is computed: it may be a
        tensor, a number, a tuple."""
        if not isinstance(value, fx.Proxy):
            return value
        known = {"placeholder": self.given, "get_attr": self.own}.get(value.node.op, {})
        if value.node.target in known:
            return known[str(value.node.target)]
        self.note(
            "it asks for the class or an attribute of what it computes, which fx does not know"
        )
        raise Refused(self.unseen)

    def note(self, what: str) -> None:
        """Note what the model does with a value that fx does not see, with the line that runs, so
        that the trace is refused, also where the model catches an error that this raises."""
        self.unseen = self.unseen or f"{what} (at {line_of_the_model(sys._getframe(1))})"

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.note("it branches by a value, which fx does not know")
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Any:
        self.note("it loops over a value, whose length fx does not know")
        return super().iter(obj)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and a.grad_fn is not None:
            self.folded.trained.append(a)
        if isinstance(a, Tensor) and a not in self.tensor_attrs and self.folded.is_made(a):
            name = self.tensor_attrs[a] = self.get_fresh_qualname(MADE)
            setattr(self.root, name, a)
        return super().create_arg(a)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        proxies = [self.create_proxy("placeholder", n, (), {}) for n in self.example.names]
        names = [str(proxy.node.target) for proxy in proxies]
        self.given = dict(zip(names, self.example.tensors, strict=True))
        args, kwargs = self.example.arguments(proxies)

        def forward() -> Any:
            model = self.example.model
            with buffers_kept(model) as written, computed_with(model) as self.folded:
                output = model.forward(*args, **kwargs)
            for write in written:
                if isinstance(write, fx.Proxy):
                    _move_ahead(write.node)
            tensors, structure = Structure.of(output)
            if not structure.opens_objects:  # fx puts tuples, lists and dicts into the graph itself
                return output
            self.rebuild = structure.fill
            return tensors

        return forward, []


def _written_by(target: Any, args: Any, kwargs: Any) -> Any:
    """The argument to which a node writes in place, as in ``mean.copy_(...)``, ``mean[0] = ...``,
    ``step += ...`` and ``out=mean``; a list in ``torch._foreach_add_([mean], 1)``. None if it
    writes to none."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.strip("_") if name.startswith("__") else name
    is_in_place = name in _IN_PLACE or name.endswith("_")
    return args[0] if is_in_place and args else kwargs.get("out")


_IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"}
_IN_PLACE |= {"iand", "ior", "ixor", "ilshift", "irshift", "imatmul"}


def _is_the_models(target: Any) -> bool:
    """Whether a node calls a function of the model's, which the user has wrapped by ``fx.wrap``."""
    return isinstance(target, FunctionType) and is_of_a_model(target.__code__.co_filename)


def _check_containers(graph_module: fx.GraphModule) -> None:
    """Let modules that are one node, and are given lists, raise an error if they change these."""
    for node in graph_module.graph.find_nodes(op="call_module"):
        module = graph_module.get_submodule(str(node.target))
        is_the_models = not isinstance(module, Unchanging) and not _is_torchs(module)
        if is_the_models and has_containers((*node.args, *node.kwargs.values())):
            graph_module.set_submodule(str(node.target), Unchanging(module))


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _move_ahead(write: fx.Node) -> None:
    """Move a write to a buffer as far ahead in the graph as it may be: right behind the nodes that
    compute what is written and the nodes that read the old buffer. It has been traced at the end of
    the graph, where it would keep the stage that has the buffer from ending any earlier."""
    buffer, value = write.all_input_nodes
    graph, moved = write.graph, [write, value]
    needed = {buffer, *value.all_input_nodes}
    for read in graph.find_nodes(op="get_attr", target=buffer.target):
        needed |= {read, *read.users}
    last = next(n for n in reversed(graph.nodes) if n in needed and n not in moved)
    for node in moved:
        last.append(node)


def _as_a_node(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of an autograd Function as one node. fx would trace into its forward, and the
    backward that it defines would be lost. NotImplemented if none of the arguments is a proxy."""
    proxy = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
    if proxy is None:
        return NotImplemented
    return proxy.tracer.create_proxy("call_function", as_callable(function), args, kwargs)
