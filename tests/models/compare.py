"""Runs a model of the zoo as a pipeline and as a loop over its micro-batches, and compares both."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from tests.models.registry import Entry
from tests.zoo import parts

STAGES, CHUNKS, BATCH = 4, 3, 6
CASES = [(training, mode) for training in (True, False) for mode in ("never", "always")]
"""Train or eval mode, and when to checkpoint."""

TOLERANCE = 1e-5  # relative; for models that torch.export has traced
SMALL = 1e-4


@dataclass(frozen=True)
class Result:
    """How near a model's pipeline came to the loop in one case, and how it was compiled."""

    front_end: str
    nodes: int  # of the model graph
    skips: int
    difference: float  # from the loop, see :func:`difference`
    compile_s: float

    @staticmethod
    def of(pipe: fxpipe.Pipeline, apart: float, compile_s: float) -> Result:
        """The result of a pipeline that has been so far apart from the loop."""
        nodes, skips = len(pipe.model_graph.graph.nodes), len(pipe.skip_layout.skips)
        return Result(pipe.front_end, nodes, skips, apart, compile_s)

    @property
    def is_good(self) -> bool:
        """Whether the difference is no more than the front end promises."""
        return self.difference <= (0.0 if self.front_end == "symbolic" else TOLERANCE)


@dataclass(frozen=True)
class Step:
    """All that a forward and a backward leave behind, on the CPU, by name."""

    outputs: dict[str, Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@contextmanager
def one_thread() -> Iterator[None]:
    """Both sides compute with one intra-op thread, since their bits are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(entry: Entry, training: bool, checkpoint: str) -> Result:
    """Run a model as a pipeline and in a loop, and look for differences.

    Raises:
        AssertionError: for outputs of another structure, or gradients in other places.
        What the model or ``fxpipe`` raise.
    """
    with one_thread():
        torch.manual_seed(0)
        inputs = batch_for(entry)
        model = build(entry, training)
        with compiled(entry, model, checkpoint) as pipe:
            start = time.process_time()
            pipe.prepare(**inputs)
            compile_s = time.process_time() - start
            apart = difference_on(pipe, model, build(entry, training), inputs)
            return Result.of(pipe, apart, compile_s)


def compiled(entry: Entry, model: nn.Module, checkpoint: str) -> fxpipe.Pipeline:
    """The pipeline of an entry's model."""
    options = {"check": "warn" if entry.across else True, **entry.options}
    return fxpipe.compile(model, ["cpu"] * STAGES, chunks=CHUNKS, checkpoint=checkpoint, **options)


def difference_on(
    pipe: fxpipe.Pipeline, model: nn.Module, plain: nn.Module, inputs: dict[str, Any]
) -> float:
    """How far the pipeline of a model is from a plain copy in a loop over the micro-batches."""
    actual = run_step(model, lambda: [pipe(**inputs)])
    expected = run_step(plain, lambda: [plain(**part) for part in micro_batches(inputs)])
    return difference(expected, actual)


def build(entry: Entry, training: bool) -> nn.Module:
    """The model; the same weights every time."""
    torch.manual_seed(1)
    model = entry.build().train(training)
    if entry.double:
        model.double()
    if entry.warm:
        with torch.no_grad():
            model(**batch_for(entry))
    return model


def batch_for(entry: Entry, batch: int = BATCH) -> dict[str, Any]:
    """A batch for the model, as precise as it is."""
    inputs = entry.inputs(batch)
    if not entry.double:
        return inputs
    return pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs
    )


def micro_batches(inputs: dict[str, Any], batch: int = BATCH) -> Iterator[dict[str, Any]]:
    """The inputs, cut as a pipeline cuts them: a tensor without the batch's rows goes to all."""
    for i in range(CHUNKS):
        yield pytree.tree_map_only(
            Tensor, lambda t, i=i: parts(t, CHUNKS)[i] if t.shape[0] == batch else t, inputs
        )


def run_step(model: nn.Module, run: Any, rows: int = BATCH // CHUNKS) -> Step:
    """The forwards of micro-batches of ``rows`` rows each, which ``run`` makes, then the backwards,
    the last micro-batch first."""
    torch.manual_seed(2)
    outputs = run()
    named = [_leaves(output) for output in outputs]
    gathered: dict[str, Any] = {}
    cut: list[dict[str, Tensor]] = [{} for _ in outputs]
    for name, leaf in named[0].items():
        if not isinstance(leaf, Tensor):
            gathered[name] = leaf
            continue
        leaves = [output[name] for output in named]
        for part, tensor in zip(cut, leaves, strict=True):
            part[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        whole = [part[name] for part in cut]
        gathered[name] = _joined(whole, rows) if leaf.ndim else _mean(whole)
    loss = [torch.sin(t).sum() for t in gathered.values() if _is_differentiable(t)]
    if loss:
        torch.stack(loss).sum().backward()
    for output, part in zip(reversed(named), reversed(cut), strict=True):
        pairs = [(output[name], t.grad) for name, t in part.items() if t.grad is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    return Step(
        {k: v.detach() if isinstance(v, Tensor) else v for k, v in gathered.items()},
        {name: p.grad for name, p in model.named_parameters()},
        dict(model.named_buffers()),
    )


def _joined(parts: list[Tensor], rows: int) -> Tensor:
    """The parts put together along the batch: the first dimension that has ``rows`` elements (there
    may be frames ahead of it), or else dimension 0."""
    shape = list(parts[0].shape)
    return torch.cat(parts, shape.index(rows) if rows in shape else 0)


def _mean(scalars: list[Tensor]) -> Tensor:
    """The scalar that a pipeline makes of those of its micro-batches, which are of equal size."""
    if scalars[0].is_floating_point():
        return torch.stack(scalars).mean()
    assert all(scalar == scalars[0] for scalar in scalars)
    return scalars[0]


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _leaves(value: Any, path: str = "output") -> dict[str, Any]:
    """All values in an output, by their paths; objects are opened by their attributes."""
    if isinstance(value, Mapping):
        children = {f"{path}.{key}": child for key, child in value.items()}
    elif isinstance(value, list | tuple):
        children = {f"{path}[{i}]": child for i, child in enumerate(value)}
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type):
        children = {f"{path}.{key}": child for key, child in vars(value).items()}
    else:
        return {path: value}
    return {k: leaf for key, child in children.items() for k, leaf in _leaves(child, key).items()}


def difference(expected: Step, actual: Step) -> float:
    """The largest difference of two steps, relative to the largest value of the tensor it is in.

    Some tensors hold nothing but rounding errors (such as the gradient of a bias that cancels in a
    softmax). So no difference is taken relative to less than ``SMALL`` times the largest value of
    all outputs, all gradients or all buffers.
    """
    worst = 0.0
    for ours, theirs in (
        (actual.outputs, expected.outputs),
        (actual.gradients, expected.gradients),
        (actual.buffers, expected.buffers),
    ):
        assert list(ours) == list(theirs), f"{list(ours)} in place of {list(theirs)}"
        scale = max((_largest(t) for t in theirs.values() if isinstance(t, Tensor)), default=0.0)
        for name, value in theirs.items():
            other = ours[name]
            assert type(other) is type(value), f"{name}: {type(other)} in place of {type(value)}"
            if isinstance(value, Tensor):
                assert other.dtype == value.dtype and other.shape == value.shape, name
                assert other.layout == value.layout, name
                worst = max(worst, _apart(value, other, max(_largest(value), SMALL * scale)))
            else:
                assert other == value, f"{name}: {other!r} in place of {value!r}"
    return worst


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().to_dense().to(torch.complex128).abs().nan_to_num(posinf=0.0).max())


def _apart(expected: Tensor, actual: Tensor, scale: float) -> float:
    expected, actual = expected.to_dense(), actual.to_dense()
    if torch.equal(expected, actual) or not expected.numel():
        return 0.0
    apart = (expected.detach().to(torch.complex128) - actual.detach().to(torch.complex128)).abs()
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    apart = apart.masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    return float(apart.max()) / (scale or 1.0)
