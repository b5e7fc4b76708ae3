"""A backend of ``torch.compile``: the graph that Dynamo captures runs as a pipeline.

::

    torch.compile(model, backend=fxpipe.backend(devices=["cuda:0", "cuda:1"], chunks=8))

    Dynamo's graph                          the model that is compiled
    (weight, s0, x) ─ linear ─ view(s0)     (x) ─ linear (its own weight) ─ view(x.size(0))

In Dynamo's graph parameters, buffers and sizes are inputs. Here parameters and buffers become
attributes of the graph module again, so that each can be moved to the device of its stage; and
sizes are read from the tensors again, so that a micro-batch has sizes of its own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.api import compile
from fxpipe.ir._torch import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD_ENABLED,
    dynamo,
    may_vary,
    rename,
)
from fxpipe.ir.graph import is_work
from fxpipe.pipeline import Pipeline


class BackendError(RuntimeError):
    """The graph that Dynamo has captured cannot become a pipeline; the message says why."""


def backend(devices: Sequence[str | torch.device] | None = None, **options: Any) -> Backend:
    """For ``torch.compile(model, backend=...)``: run the model as a pipeline.

    Args:
        devices, options: as for :func:`fxpipe.compile`, but without ``example_inputs`` and
            ``tracer``, since Dynamo traces the model, and without ``loss_fn`` and ``schedule``,
            since there is no ``step()``. ``in_dims`` is a dict by the names of the arguments.

    The model has to be captured in one graph, and for any batch size, since micro-batches are
    smaller than the example.

    Raises:
        ValueError, TypeError: for options that make no sense, or have no meaning here.
        BackendError: at the first call, if the graph is not the whole model; Dynamo then raises a
            ``BackendCompilerFailed`` with that message.
    """
    if not isinstance(options.get("in_dims") or {}, dict):
        raise ValueError(
            f"in_dims is {options['in_dims']!r}: give a dict by the names of the arguments, since "
            "those that are no tensors are not passed on by Dynamo"
        )
    unknown = {"example_inputs", "example_kwargs", "tracer", "loss_fn", "schedule"} & set(options)
    if unknown:
        raise ValueError(
            f"{sorted(unknown)[0]} has no meaning for a backend of torch.compile: leave it away, "
            "or use fxpipe.compile"
        )
    compile(nn.Identity(), devices, **options)  # raises if the options are wrong
    return Backend(devices, options)


class Backend:
    """A backend for ``torch.compile``, made by :func:`backend`. ``pipelines`` has one pipeline for
    each graph that Dynamo has captured."""

    def __init__(self, devices: Sequence[str | torch.device] | None, options: dict[str, Any]):
        self.devices, self.options = devices, options
        self.pipelines: list[Pipeline] = []
        self.__name__ = "fxpipe"  # in Dynamo's messages

    def __call__(self, gm: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo has captured, and return the function that runs it. Dynamo
        calls this, with the graph and its example inputs."""
        _refuse_a_part(gm)
        gm = _copied(gm)  # Dynamo uses the original afterwards
        inputs = list(map(_GraphInput.of, gm.graph.find_nodes(op="placeholder"), example))
        in_dims = self._symbolic_batch([each for each in inputs if each.is_tensor])
        bound = _bind(gm, inputs)
        _read_sizes_from_tensors(gm, inputs)
        _keep_regions_whole(gm)
        gm.recompile()
        free = {i: each for i, each in enumerate(inputs) if each.node is not None}
        options = self.options | {"in_dims": in_dims, "tracer": _specialised}
        pipe = compile(gm, self.devices, **options)
        pipe.prepare(*(each.value(example[i]) for i, each in free.items()))
        for tensor in bound.values():
            tensor.stay()
        self.pipelines.append(pipe)

        def run(*args: Any) -> Any:
            for i, tensor in bound.items():
                tensor.refresh(args[i])
            return pipe(*(each.value(args[i]) for i, each in free.items()))

        return run

    def _symbolic_batch(self, inputs: Sequence[_GraphInput]) -> dict[str, int | None]:
        """``in_dims`` for these inputs; Dynamo has to capture the model again until the batch size
        is a symbol in its graph.

        At first Dynamo makes all sizes constants. The dimensions that should vary are marked, and
        an exception makes Dynamo capture the model anew.

        Raises:
            BackendError: if the model makes a constant of its batch size.
        """
        said: dict[str, int | None] = self.options.get("in_dims") or {}
        dims = {
            each.path: dim
            for each in inputs
            if (dim := said.get(each.path, 0)) is not None and each.example.ndim > dim
        }
        has_asked = False
        for each in inputs:
            dim = dims.get(each.path)
            if dim is not None and dim not in may_vary(each.example):
                dynamo().maybe_mark_dynamic(each.example, dim)
                has_asked = True
        if has_asked:
            raise _BeginAnew(restart_reason="the batch's size has to be symbolic")
        fixed = [e for e in inputs if e.path in dims and not e.is_symbolic(dims[e.path])]
        many = [e for e in fixed if e.example.shape[dims[e.path]] > 1]
        if many and len(fixed) == len(dims) and self.options.get("chunks") != 1:
            raise BackendError(
                f"the model makes a constant of its batch size, {many[0].path} "
                f"{tuple(many[0].example.shape)}: take sizes from tensors, x.shape[0], in place of "
                "numbers, or give chunks=1"
            )
        return {each.path: None for each in fixed} | said


class _BeginAnew(
    dynamo().exc.TensorifyScalarRestartAnalysis,  # type: ignore[misc] # which a backend may raise
    dynamo().exc.UnspecializeRestartAnalysis,  # type: ignore[misc] # after which Dynamo may take another way
):
    """An exception that makes Dynamo capture the model again, with the marked sizes as symbols."""


def _refuse_a_part(gm: fx.GraphModule) -> None:
    reason = getattr(gm, "compile_subgraph_reason", None)
    if getattr(reason, "graph_break", False):
        where = [f"{f.filename}:{f.lineno}: {f.line}" for f in reason.user_stack[-1:]]  # type: ignore[union-attr]
        why = " ".join(str(reason.reason).split())  # type: ignore[union-attr]
        raise BackendError(
            "Dynamo cannot capture the model in one graph, and a pipeline needs the whole: "
            f"{why}{''.join(f' (at {line})' for line in where)}; torch.compile(fullgraph=True) "
            "says more of it; mend that line, or use fxpipe.compile(model), which traces otherwise"
        )


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph, which may be changed. Its nodes have the paths of modules as in the
    model, so that names in ``partition=`` are found."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        node.meta["nn_module_stack"] = {
            k: (_within_model(path), kind) for k, (path, kind) in stack.items()
        }
    return fx.GraphModule(gm, graph, "Captured")


@dataclass
class _GraphInput:
    """An input of Dynamo's graph. ``node`` is its placeholder, or None once that is removed."""

    node: fx.Node | None
    example: Any
    path: str  # its name in the model: "layers.0.weight", or the name of an argument
    is_owned: bool  # whether a module has it: a parameter, a buffer, or a tensor attribute
    is_number: bool  # whether it is a float, which Dynamo passes as a tensor

    @staticmethod
    def of(node: fx.Node, example: Any) -> _GraphInput:
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        kind = "" if source is None else source.guard_source.name
        items = [user for user in node.users if user.target == "item"]
        is_number = bool(
            getattr(argument, "pass_arg_as_tensor", False) and len(items) == len(node.users)
        )
        for item in items if is_number else ():
            item.replace_all_uses_with(node)
            node.graph.erase_node(item)
        is_owned = isinstance(example, nn.Parameter) or (
            isinstance(example, Tensor) and kind.endswith("NN_MODULE") and not is_number
        )
        name = getattr(source, "name", node.name)
        name = name() if callable(name) else name  # a method in PyTorch 2.11
        path = _within_model(name) if is_owned else _argument(name)
        if not is_owned:
            node.target = path
            rename(node, path)
        return _GraphInput(node, example, path, is_owned, is_number)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor among the arguments of the call."""
        return isinstance(self.example, Tensor) and not (self.is_owned or self.is_number)

    def is_symbolic(self, dim: int) -> bool:
        """Whether the size of that dimension is a symbol in the graph, and not a constant."""
        assert self.node is not None
        size = self.node.meta["example_value"].shape[dim]
        return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None

    def value(self, given: Any) -> Any:
        """The value of this input, as the pipeline takes it: symbolic sizes and numbers as plain
        ones."""
        if isinstance(given, torch.SymInt):
            return int(given)
        return float(given) if self.is_number else given


def _within_model(source: str) -> str:
    """The path in the model that Dynamo's name of a tensor stands for: ``a.weight`` for
    ``L['self']._modules['a']._parameters['weight']``."""
    own = re.sub(r"^[LG]\['\w+'\]|\b(_modules|_parameters|_buffers|__dict__)\b", "", source)
    return ".".join(re.findall(r"\w+", own))


def _argument(source: str) -> str:
    """The name of an argument, from Dynamo's: ``x`` for ``L['x']``, ``pair_0`` for
    ``L['kwargs']['pair'][0]``, and ``arg_0`` for ``L['args'][0]``."""
    parts = re.findall(r"\w+", source)
    name = "_".join(part for part in parts if part not in ("L", "G", "args", "kwargs"))
    return name if name.isidentifier() else f"arg_{name}"


class Bound:
    """A parameter or buffer of the model, which the graph module holds under the same name."""

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self.name = name
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
            self.place: dict[str, Any] = owner._parameters
        else:
            owner.register_buffer(name, tensor)
            self.place = owner._buffers
        self.tensor = tensor

    def stay(self) -> None:
        """Move the model's own buffer to the device to which its copy in the graph has been
        moved."""
        placed = self.place[self.name]
        if placed is not self.tensor:
            self.tensor.data = placed.data
            self.place[self.name] = self.tensor

    def refresh(self, tensor: Tensor) -> None:
        """Hold the tensor that a call gives, if the model has replaced its parameter or buffer."""
        if tensor is not self.tensor:
            self.tensor = self.place[self.name] = tensor


def _bind(gm: fx.GraphModule, inputs: Sequence[_GraphInput]) -> dict[int, Bound]:
    """Make the inputs that are parameters and buffers attributes of the graph module, under their
    names in the model. Returns these by the index of the input."""
    bound: dict[int, Bound] = {}
    for i, each in enumerate(inputs):
        if each.is_owned and each.node is not None:
            *parents, name = each.path.split(".")
            owner: nn.Module = gm
            path = []
            for parent in parents:
                if parent not in owner._modules:
                    parent = _free(owner, parent)
                    owner.add_module(parent, nn.Module())
                path.append(parent)
                owner = owner.get_submodule(parent)
            path.append(_free(owner, name))
            bound[i] = Bound(owner, path[-1], each.example)
            with gm.graph.inserting_before(each.node):
                got = gm.graph.create_node("get_attr", ".".join(path))
            got.meta = {k: v for k, v in each.node.meta.items() if k != "grapharg"}
            each.node.replace_all_uses_with(got)
            gm.graph.erase_node(each.node)
            each.node = None
    return bound


def _free(owner: nn.Module, name: str) -> str:
    while hasattr(owner, name):
        name += "_"
    return name


def _read_sizes_from_tensors(gm: fx.GraphModule, inputs: Sequence[_GraphInput]) -> None:
    """Replace each input that is a size by a ``size()`` call on the tensor input that has it."""
    where: dict[Any, tuple[fx.Node, int]] = {}
    for each in inputs:
        if each.node is not None and each.is_tensor:
            for dim, size in enumerate(each.node.meta["example_value"].shape):
                if isinstance(size, torch.SymInt):
                    where.setdefault(size.node.expr, (each.node, dim))
    for each in inputs:
        number = None if each.node is None else each.node.meta.get("example_value")
        if isinstance(number, torch.SymInt) and number.node.expr in where:
            tensor, dim = where[number.node.expr]
            with gm.graph.inserting_after(tensor):
                own = gm.graph.call_method("size", (tensor, dim))
            assert each.node is not None
            each.node.replace_all_uses_with(own)
            gm.graph.erase_node(each.node)
            each.node = None


def _specialised(model: nn.Module, args: tuple[Any, ...], _: dict[str, Any]) -> fx.GraphModule:
    """A copy of the graph in which arguments that are no tensors have become constants."""
    assert isinstance(model, fx.GraphModule)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    given = iter(args)
    for node in model.graph.nodes:
        value = next(given) if node.op == "placeholder" else None
        if node.op == "placeholder" and not isinstance(value, Tensor):
            copies[node] = value
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(model, graph, "Captured")


# ------------------------------------------------------------------------------- no_grad, autocast


def _keep_regions_whole(gm: fx.GraphModule) -> None:
    """Make one node of each region that runs under ``no_grad`` or an autocast within the forward.

    Dynamo marks the beginning and the end of such a region by calls that switch the mode of the
    running thread. A pipeline could cut between the two, and stages run in different threads.
    """
    for number, region in enumerate(list(_regions(gm.graph))):
        inside = set(region)
        takes = {n: None for node in region for n in node.all_input_nodes if n not in inside}
        gives = [node for node in region if not inside.issuperset(node.users)]
        graph = fx.Graph()
        own: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in takes}
        for node in region:
            own[node] = graph.node_copy(node, own.__getitem__)
        graph.output(tuple(own[node] for node in gives))
        name = _free(gm, f"region_{number}")
        gm.add_submodule(name, fx.GraphModule(gm, graph, name))
        with gm.graph.inserting_after(region[-1]):
            call = gm.graph.call_module(name, tuple(takes))
        with gm.graph.inserting_after(call):
            made = [gm.graph.call_function(operator.getitem, (call, i)) for i in range(len(gives))]
        for given, item in zip(gives, made, strict=True):
            item.meta = dict(given.meta)
            given.replace_all_uses_with(item)
        for done in reversed(region):
            gm.graph.erase_node(done)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The regions of a graph: the nodes from each switch of gradients or autocast to the switch
    that takes it back.

    Raises BackendError if a switch is never taken back.
    """
    usual = torch.is_grad_enabled()
    region: list[fx.Node] = []
    grad, casts = usual, 0
    for node in filter(is_work, list(graph.nodes)):
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            casts += 1
        elif node.target is EXIT_AUTOCAST:
            casts -= 1
        elif grad == usual and not casts:
            continue
        region.append(node)
        if grad == usual and not casts:
            yield region
            region = []
    if region:
        raise BackendError(
            "the model leaves gradients or autocast switched otherwise than it found them, at "
            f"{region[0].meta.get('stack_trace') or region[0]}: switch them in a with statement"
        )
