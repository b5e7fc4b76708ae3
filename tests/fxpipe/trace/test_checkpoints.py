"""The checkpoints that a model has itself stay what they are: they save what they did in the model,
give the gradients that they gave, and are nodes of the graph.

What is compared with is a loop over micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fxpipe
from fxpipe.ir.printing import format_graph
from fxpipe.runtime.checkpointing.checkpoint import CheckpointOptions
from fxpipe.runtime.checkpointing.regions import Region
from tests.fxpipe.trace.small import BOTH
from tests.zoo import same

KINDS = pytest.mark.parametrize("reentrant", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Blocks(nn.Module):
    def __init__(self, reentrant: bool, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def in_a_loop(model: nn.Module, x: Tensor, chunks: int) -> Tensor:
    return torch.cat([model(part) for part in x.chunk(chunks)])


def saved_by(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many numbers autograd saves."""
    numbers = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return numbers, result


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.covering(1)
@BOTH
@KINDS
def test_no_more_is_saved_than_by_the_model_and_gradients_and_buffers_are_the_models(
    tracer: str, reentrant: bool
) -> None:
    model, x = Blocks(reentrant), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer, example_inputs=(x,)) as pipe:
        ours, y = saved_by(lambda: pipe(x))
        theirs, wanted = saved_by(lambda: in_a_loop(plain, x, 3))
        y.square().sum().backward()
        wanted.square().sum().backward()
    assert ours <= theirs
    assert same(y.detach(), wanted.detach())
    assert same(gradients(model), gradients(plain))
    assert same(list(model.buffers()), list(plain.buffers()))
    assert model.blocks[0].norm.num_batches_tracked == 6, "PyTorch's checkpoint counts twice"


def test_a_checkpoint_is_one_node_and_the_report_names_it() -> None:
    model, x = Blocks(False, count=2), torch.randn(4, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        assert format_graph(pipe.model_graph) == (
            "x: input\n"
            "first = first(x)  # stage 0\n"
            "blocks_0_checkpoint = blocks_0_checkpoint(first)  # stage 0\n"
            "blocks_1_checkpoint = blocks_1_checkpoint(blocks_0_checkpoint)  # stage 1\n"
            "return blocks_1_checkpoint\n"
        )
        assert format_graph(pipe.model_graph.blocks_1_checkpoint.body) == (
            "blocks_0_checkpoint: input\n"
            "blocks_1_a = blocks.1.a(blocks_0_checkpoint)\n"
            "blocks_1_norm = blocks.1.norm(blocks_1_a)\n"
            "relu_1 = relu(blocks_1_norm)\n"
            "blocks_1_b = blocks.1.b(relu_1)\n"
            "add_1 = add(blocks_0_checkpoint, blocks_1_b)\n"
            "return add_1\n"
        )
        said = "blocks_1_checkpoint (stage 1) is checkpointed by the model"
        assert said in str(pipe.report())


def test_a_stage_may_begin_at_a_module_that_is_checkpointed() -> None:
    model, x = Blocks(False, count=3), torch.randn(4, 8)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, partition=["blocks.2"], example_inputs=(x,)
    ) as pipe:
        assert pipe.stage_graph.stage_1.graph.find_nodes(
            op="call_module", target="blocks_2_checkpoint"
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["except_last", "always"])
@KINDS
def test_they_may_be_within_checkpointed_stages(mode: str, reentrant: bool) -> None:
    model, x = Blocks(reentrant), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=mode) as pipe:
        pipe(x).square().sum().backward()
    in_a_loop(plain, x, 3).square().sum().backward()
    assert same(gradients(model), gradients(plain))
    assert same(list(model.buffers()), list(plain.buffers()))


@KINDS
def test_a_step_goes_through_them(reentrant: bool) -> None:
    model, x = Blocks(reentrant), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    loss_fn = nn.MSELoss()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        pipe.step(x, target=x)
    for part in x.chunk(2):
        (loss_fn(plain(part), part) / 2).backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@BOTH
def test_a_reentrant_one_without_an_input_that_requires_a_gradient_has_none(tracer: str) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lost, self.kept = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.kept(checkpoint(self.lost, x, use_reentrant=True))

    model, x = First(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        pipe(x).square().sum().backward()
        assert model.lost.weight.grad is None and model.kept.weight.grad is not None
        model.zero_grad()
        pipe(x.requires_grad_()).square().sum().backward()
    in_a_loop(plain, x, 2).square().sum().backward()
    assert same(gradients(model), gradients(plain))


class Two(nn.Module):
    """Gives two outputs, of which one is computed within a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def both(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.b(x))
        return y * scale, y.exp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x)
        y, z = checkpoint(self.both, x, x.sigmoid(), use_reentrant=self.reentrant)
        return self.c(y), z


@BOTH
@KINDS
def test_with_several_outputs_all_have_their_gradients(tracer: str, reentrant: bool) -> None:
    model, x = Two(reentrant), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        y, z = pipe(x)
        (y.sum() + z.square().sum()).backward()
    for part in reversed(x.chunk(2)):
        y, z = plain(part)
        (y.sum() + z.square().sum()).backward()
    assert same(gradients(model), gradients(plain))


@BOTH
def test_the_second_run_drops_what_the_first_has(tracer: str) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.drop(x) * x, x, use_reentrant=False)

    x = torch.rand(8, 16, requires_grad=True)
    with fxpipe.compile(Drops(), ["cpu"], chunks=4, tracer=tracer) as pipe:
        y = pipe(x)
        y.sum().backward()
    assert (y == 0).any() and same(y.detach(), x.detach() * x.grad / 2)


@BOTH
def test_they_may_be_nested(tracer: str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "abc")

        def inner(self, x: Tensor) -> Tensor:
            return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[2](checkpoint(self.inner, x, use_reentrant=False))

    model, x = Nested(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        ours, y = saved_by(lambda: pipe(x))
        theirs, wanted = saved_by(lambda: in_a_loop(plain, x, 2))
        y.square().sum().backward()
        wanted.square().sum().backward()
    assert ours <= theirs
    assert same(gradients(model), gradients(plain))


class Again(nn.Module):
    """Calls one block, whose weight another one shares, in two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(8))

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.scaled, x, use_reentrant=False)
        return self.last(x)


@BOTH
def test_their_parameters_may_be_shared_and_exchanged(tracer: str) -> None:
    model, x = Again(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=2, tracer=tracer) as pipe:
        pipe(x).square().sum().backward()
        for part in reversed(x.chunk(2)):
            plain(part).square().sum().backward()
        assert same(gradients(model), gradients(plain))
        other = Again()
        model.load_state_dict(other.state_dict(), assign=True)
        model.last.weight = model.first.weight
        assert same(pipe(x).detach(), in_a_loop(other, x, 2).detach())


def test_what_is_checkpointed_in_training_only_stays_where_it_is_in_evaluation() -> None:
    class Trained(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            run = partial(checkpoint, use_reentrant=False) if self.training else lambda f, x: f(x)
            x = self.first(x)
            for block in self.blocks:
                x = run(block, x)
            return x

    model, x = Trained(False), torch.randn(4, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        homes = [set(stage.module.state_dict()) for stage in pipe.stages]
        model.eval()
        assert same(pipe(x).detach(), in_a_loop(model, x, 2).detach())
        first = {path.rpartition(".body.")[2] for path in homes[0]}
        assert set(pipe.stages[0].module.state_dict()) == first


@BOTH
def test_a_sequence_that_is_checkpointed_in_segments(tracer: str) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    model, x = Segments(), torch.randn(6, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        ours, y = saved_by(lambda: pipe(x))
        theirs, wanted = saved_by(lambda: in_a_loop(model, x, 2))
        assert ours <= theirs and same(y.detach(), wanted.detach())


@BOTH
def test_fxpipes_own_checkpoint_in_a_model_is_kept_too(tracer: str) -> None:
    class Own(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = fxpipe.checkpoint(block, x)
            return x

    model, x = Own(False), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(x,)) as pipe:
        ours, y = saved_by(lambda: pipe(x))
        theirs, wanted = saved_by(lambda: in_a_loop(plain, x, 2))
        y.square().sum().backward()
        wanted.square().sum().backward()
    assert ours <= theirs
    assert same(gradients(model), gradients(plain))
    assert model.blocks[0].norm.num_batches_tracked == 2, "ours counts once"
    assert same(list(model.buffers()), list(plain.buffers()))


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@KINDS
def test_transformers_with_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=32, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    plain, ids = copy.deepcopy(model), torch.randint(32, (4, 8))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_kwargs={"input_ids": ids}) as pipe:
        ours, y = saved_by(lambda: pipe(input_ids=ids).logits)
        theirs, wanted = saved_by(
            lambda: torch.cat([plain(input_ids=part).logits for part in ids.chunk(2)])
        )
        y.square().sum().backward()
        wanted.square().sum().backward()
    masks = 2 * 4 * 8 * 8  # of GPT-2: its layers are given one by transformers, if exported
    assert ours <= theirs + (masks if kind == "gpt2" else 0)
    for mine, other in zip(gradients(model), gradients(plain), strict=True):
        assert mine is not None and other is not None
        torch.testing.assert_close(mine, other)


class Keeping(nn.Module):
    """Asks for a checkpoint with everything that PyTorch's function takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.options = nn.Linear(8, 8), Block(), options

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.first(x), use_reentrant=False, **self.options)
        return y


def products_are_kept(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@BOTH
def test_a_selective_checkpoint_keeps_what_it_keeps_in_the_model(tracer: str) -> None:
    model = Keeping(context_fn=partial(create_selective_checkpoint_contexts, products_are_kept))
    x = torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"], chunks=1, tracer=tracer, example_inputs=(x,)) as pipe:
        y, wanted = pipe(x), plain(x)
        with Products() as ours:
            y.sum().backward()
        with Products() as theirs:
            wanted.sum().backward()
    assert same(gradients(model), gradients(plain))
    assert ours.count == theirs.count, "no product is computed again"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"determinism_check": "none"}, CheckpointOptions(determinism_check="none")),
        ({"debug": True}, CheckpointOptions(debug=True)),
        ({"preserve_rng_state": False}, CheckpointOptions(preserve_rng_state=False)),
        ({"early_stop": False}, CheckpointOptions(early_stop=False)),
    ],
)
def test_a_checkpoint_has_the_options_that_the_model_gives(
    options: dict[str, Any], found: CheckpointOptions
) -> None:
    model, x = Keeping(**options), torch.randn(4, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        (region,) = (m for m in pipe.model_graph.modules() if isinstance(m, Region))
    assert region.settings.options == replace(found, writes_again=True)


@pytest.mark.covering(1)
@BOTH
@KINDS
def test_deferred_batch_norms_within_them_count_a_mini_batch_once(
    tracer: str, reentrant: bool
) -> None:
    model, x = Blocks(reentrant, count=2), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, tracer=tracer, deferred_batch_norm=True, example_inputs=(x,)
    ) as pipe:
        y = pipe(x)
        y.square().sum().backward()
    expected = model.blocks[0].a(plain.first(x))
    norm = model.blocks[0].norm
    assert norm.num_batches_tracked == model.blocks[1].norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * expected.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * expected.var(0))
    wanted = in_a_loop(plain, x, 3)
    wanted.square().sum().backward()
    assert same(y.detach(), wanted.detach())
    assert same(gradients(model), gradients(plain))
