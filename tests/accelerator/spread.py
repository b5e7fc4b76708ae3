"""A model whose stages are on several devices is compiled for another kind of call where it is: no
device gets the parameters of another one meanwhile, as its allocator counts (``sim/memory.h``)."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir._torch import DisableTorchFunction
from tests.zoo import gradients, loop, loss_of

DEVICES = ["sim:0", "sim:1", "sim:2"]
WIDTH, DEPTH = 96, 12
"""The parameters of a stage take 150 kB and more; a batch takes 1.5 kB for each position."""


class Plain(nn.Module):
    """Layers from tokens to tokens; what each layer does is up to the subclass."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 11)

    def block(self):
        return nn.Linear(WIDTH, WIDTH)

    def layer(self, block, x):
        return torch.tanh(block(x))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.layer(block, x)
        return self.head(x)


class Normed(Plain):
    """Running statistics are written to by each training call."""

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def layer(self, block, x):
        return block(x.flatten(0, 1)).view_as(x)


class Shared(Plain):
    """The first and the last stage have one weight."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Attending(Plain):
    """Each attention is one function of all its weights. The mask is a buffer of the first stage,
    and depends on the length."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))

    def block(self):
        return nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def layer(self, block, x):
        length = x.shape[1]
        out, _ = block(x, x, x, attn_mask=self.mask[:length, :length], need_weights=False)
        return x + out


class Encoding(Plain):
    """The layers of PyTorch, which take a fast path in eval mode."""

    def block(self):
        return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)

    def layer(self, block, x):
        return block(x)


class Recurrent(Plain):
    def block(self):
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def layer(self, block, x):
        return block(x)[0]


class Dropping(Plain):
    def layer(self, block, x):
        return F.dropout(torch.tanh(block(x)), 0.2, self.training)


class OnItsDevice(Plain):
    """It asks its parameters where they are, and makes tensors there."""

    def layer(self, block, x):
        if x.device != block.weight.device:
            raise RuntimeError(f"x is on {x.device}")
        ones = torch.ones(WIDTH, device=block.weight.device)
        return torch.tanh(block(x)) + ones


class Square(torch.autograd.Function):
    """Its backward computes with a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 2 / 10

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        inner = grad * 2 * (x @ weight) / 10
        return inner @ weight.t(), x.flatten(0, 1).t() @ inner.flatten(0, 1)


class OwnBackward(Plain):
    def layer(self, block, x):
        return torch.tanh(Square.apply(x, block.weight)) + block.bias


class WeightNormed(Plain):
    """The weights of its layers are computed in each call."""

    def block(self):
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        return nn.utils.parametrizations.weight_norm(linear)


class Checkpointing(OwnBackward):
    """What is computed again is so in a backward, in a thread of the device."""

    def layer(self, block, x):
        run = super().layer
        return torch.utils.checkpoint.checkpoint(run, block, x, use_reentrant=False)


@torch.jit.script
def biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + bias)


class Scripted(Plain):
    """Modules and functions in TorchScript, into which nobody looks."""

    def block(self):
        block = nn.Module()
        block.inner = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        block.bias = nn.Parameter(torch.randn(WIDTH))
        return block

    def layer(self, block, x):
        return biased(block.inner(x), block.bias)


MODELS = {
    each.__name__: each
    for each in (
        *(Plain, Normed, Shared, Attending, Encoding, Recurrent, Dropping, OnItsDevice),
        *(OwnBackward, WeightNormed, Checkpointing, Scripted),
    )
}


def tokens(length=6, device="sim:0"):
    return torch.randint(11, (4, length), generator=torch.Generator().manual_seed(1)).to(device)


def peaks():
    """The most bytes on each device since the last :func:`begin`."""
    return [torch.accelerator.memory_stats(each)["allocated_bytes.all.peak"] for each in DEVICES]


def begin():
    """The bytes that each device has now, from which peaks are counted on."""
    gc.collect()
    for each in DEVICES:
        torch.accelerator.synchronize(each)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(each)
    return [torch.accelerator.memory_stats(each)["allocated_bytes.all.current"] for each in DEVICES]


def parameters_of(stage):
    return sum({p.data_ptr(): p.nbytes for p in stage.module.parameters()}.values())


CASES = [(name, "eval", "auto", "sim:0") for name in MODELS]
CASES += [(name, "eval", "auto", "cpu") for name in ("Plain", "OnItsDevice", "Scripted")]
CASES += [(name, "autocast", "auto", "sim:0") for name in ("Plain", "Dropping", "OnItsDevice")]
CASES += [
    (name, kind, "export", "sim:0")
    for kind in ("eval", "length", "autocast")
    for name in ("Plain", "Normed", "Shared", "Attending", "Dropping")
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "kind", "tracer", "home"), CASES)
def test_another_kind_of_call_is_compiled_where_the_parameters_are(name, kind, tracer, home):
    torch.manual_seed(0)
    model, x = MODELS[name](), tokens(9 if kind == "length" else 6, home)
    context = torch.autocast("sim", torch.bfloat16, enabled=kind == "autocast")
    with fxpipe.compile(model, DEVICES, chunks=2, tracer=tracer) as pipe:
        loss_of(pipe(tokens(device=home))).backward()
        model.zero_grad()
        model.train(kind != "eval")
        at_first = [p.device for p in model.parameters()]
        before = begin()
        with context:
            pipe.prepare(x)
        grown = [peak - now for peak, now in zip(peaks(), before, strict=True)]
        assert len(pipe.compilations) == 2
        assert [p.device for p in model.parameters()] == at_first
        own = [parameters_of(stage) for stage in pipe.stages]
        # The gradient of a weight, and what autocast makes of all that is on a device. (A backward
        # of the model's own keeps what it likes.)
        if not issubclass(MODELS[name], OwnBackward):
            # Attempts that fail leave samples in reference cycles (fx's tracer is in one with its
            # example), and when these are freed depends on when the garbage collector runs: most is
            # left where several attempts fail. A model that is gathered on one device takes the
            # parameters of two more stages there.
            most = 1.5 if name == "Scripted" else 0.8
            assert max(grown) < most * min(own), f"{grown} of {own} bytes"
        if kind == "autocast":
            return
        reference = MODELS[name]().train(kind != "eval")
        reference.load_state_dict(model.state_dict())
        if name == "Dropping" and kind != "eval":
            return
        output = pipe(x)
        loss_of(output).backward()
    wanted, wanted_gradients = loop(reference, (x.cpu(),), 2)
    torch.testing.assert_close(output.detach().cpu(), wanted)
    for found, expected in zip(gradients(model), wanted_gradients, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    for found, expected in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_a_call_without_gradients_gives_what_a_training_call_gives():
    model = Plain()
    with fxpipe.compile(model, DEVICES, chunks=2) as pipe:
        wanted = pipe(tokens()).detach()
        with torch.no_grad():
            assert torch.equal(pipe(tokens()), wanted)


class Unseen(Plain):
    """Calls what no function of PyTorch sees, as an extension in C++ does."""

    def layer(self, block, x):
        with DisableTorchFunction():
            return super().layer(block, x)


def test_code_that_brings_no_tensors_together_is_said_to_do_so():
    model = Unseen()
    with fxpipe.compile(model, DEVICES, chunks=2, tracer="export") as pipe:
        pipe(tokens())
        model.eval()
        with pytest.raises(fxpipe.TraceError) as error:
            pipe(tokens())
    said = str(error.value)
    assert "Unseen does not run while its stages are on several devices (" in said
    assert "embed.weight on sim:0, blocks.4.weight on sim:1, " in said
    assert "Expected all tensors to be on the same device" in said
    assert "call .to(device) of all that such code gets" in said
