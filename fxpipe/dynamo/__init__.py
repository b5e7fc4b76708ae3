"""A backend of ``torch.compile``: the graph that Dynamo captures runs as a pipeline.

::

    torch.compile(model, backend=fxpipe.backend(devices=["cuda:0", "cuda:1"], chunks=8))

Dynamo traces the model, and fxpipe compiles Dynamo's graph. Before that, two modules rewrite it:
``inputs`` turns parameters, buffers and sizes from inputs of the graph back into attributes and
calls, and ``regions`` makes one node of each part that runs under ``no_grad`` or an autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.api import compile
from fxpipe.dynamo.errors import BackendError
from fxpipe.dynamo.inputs import GraphInput, bind, read_sizes_from_tensors, within_model
from fxpipe.dynamo.regions import keep_regions_whole
from fxpipe.ir._torch import dynamo, may_vary
from fxpipe.ir.options import check_options, options_of
from fxpipe.pipeline import Pipeline

__all__ = ["Backend", "BackendError", "backend"]


def backend(devices: Sequence[str | torch.device] | None = None, **options: Any) -> Backend:
    """A backend for ``torch.compile(model, backend=...)``, which runs the model as a pipeline.

    Args:
        devices, options: as for :func:`fxpipe.compile`, but without ``example_inputs``,
            ``example_kwargs`` and ``tracer``, since Dynamo traces the model, and without
            ``loss_fn`` and ``schedule``, since there is no ``step()``. ``in_dims`` is a dict from
            the names of arguments to their batch dimensions.

    Dynamo has to capture the model in one graph (without graph breaks). It has to capture it for
    any batch size, since micro-batches are smaller than the example.

    Raises:
        ValueError, TypeError: for options that make no sense, or that a backend does not take.
        BackendError: at the first call, if there are graph breaks, or if the batch size is a
            constant in the graph. ``torch.compile`` raises it as a ``BackendCompilerFailed`` with
            the same message.
    """
    in_dims = options.get("in_dims")
    if in_dims is not None and not isinstance(in_dims, dict):
        raise ValueError(
            f"in_dims is {in_dims!r}: give a dict from names of arguments to their "
            "batch dimensions, since Dynamo passes on only the arguments that are tensors"
        )
    taken = [name for name in options_of(compile) if name not in _NOT_TAKEN]
    for name in options:
        if name in _NOT_TAKEN:
            raise ValueError(
                f"{name} has no meaning for a backend of torch.compile: leave it out, or use "
                "fxpipe.compile"
            )
    check_options("a backend", options, taken)
    compile(nn.Identity(), devices, **options)  # raises an error now if the options are wrong
    return Backend(devices, options)


_NOT_TAKEN = ("model", "example_inputs", "example_kwargs", "tracer", "loss_fn", "schedule")


class Backend:
    """A backend for ``torch.compile``, made by :func:`backend`. ``pipelines`` has one pipeline for
    each graph that Dynamo has captured."""

    def __init__(self, devices: Sequence[str | torch.device] | None, options: dict[str, Any]):
        self.devices, self.options = devices, options
        self.pipelines: list[Pipeline] = []
        self.__name__ = "fxpipe"  # Dynamo's messages call the backend so

    def __call__(self, gm: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo has captured, and return the function that runs it. Dynamo
        calls this method with each graph and its example inputs."""
        _refuse_a_part(gm)
        gm = _copied(gm)  # Dynamo uses the original graph after this call
        inputs = list(map(GraphInput.of, gm.graph.find_nodes(op="placeholder"), example))
        in_dims = self._symbolic_batch([each for each in inputs if each.is_tensor])
        bound = bind(gm, inputs)
        read_sizes_from_tensors(gm, inputs)
        keep_regions_whole(gm)
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

    def _symbolic_batch(self, inputs: Sequence[GraphInput]) -> dict[str, int | None]:
        """The batch dimension of each input, by its path; None for inputs without one.

        At first all sizes are constants in Dynamo's graph. If a batch dimension is not marked as
        dynamic yet, this method marks it, and raises an exception that makes Dynamo capture the
        model again, with the batch size as a symbol.

        Raises:
            BackendError: if the batch size is a constant nevertheless, since the model's code makes
                it one.
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
    dynamo().exc.TensorifyScalarRestartAnalysis,  # type: ignore[misc]
    dynamo().exc.UnspecializeRestartAnalysis,  # type: ignore[misc]
):
    """An exception that makes Dynamo capture the model again, with the marked sizes as symbols.

    Dynamo lets a backend raise the first of its bases. For the second, it forgets the branches that
    it took before, since the new graph may take others.
    """


def _refuse_a_part(gm: fx.GraphModule) -> None:
    reason = getattr(gm, "compile_subgraph_reason", None)
    if getattr(reason, "graph_break", False):
        where = [f"{f.filename}:{f.lineno}: {f.line}" for f in reason.user_stack[-1:]]  # type: ignore[union-attr]
        why = " ".join(str(reason.reason).split())  # type: ignore[union-attr]
        raise BackendError(
            "Dynamo cannot capture the model in one graph, and a pipeline needs the whole: "
            f"{why}{''.join(f' (at {line})' for line in where)}; torch.compile(fullgraph=True) "
            "says more about it; change that line, or use fxpipe.compile(model), which traces the "
            "model without Dynamo"
        )


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph, which may be changed. The metadata of its nodes has the paths that
    modules have in the model, so that ``partition=`` can name them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        node.meta["nn_module_stack"] = {
            k: (within_model(path), kind) for k, (path, kind) in stack.items()
        }
    return fx.GraphModule(gm, graph, "Captured")


def _specialised(model: nn.Module, args: tuple[Any, ...], _: dict[str, Any]) -> fx.GraphModule:
    """The tracer of the pipeline: a copy of Dynamo's graph, in which arguments that are no tensors
    have become constants."""
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
