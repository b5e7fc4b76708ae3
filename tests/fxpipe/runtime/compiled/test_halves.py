"""The cut of a compiled backward: what gradients of inputs need, and the rest."""

import pytest
import torch
from functorch.compile import aot_function
from torch import nn

import fxpipe
from fxpipe.runtime.compiled.halves import cut


def backward_of(module, *inputs):
    """The backward graph of a module; its results are gradients of the parameters, then inputs."""
    seen = []

    def keep(gm, examples):
        seen.append(gm)
        return gm.forward

    names = [name for name, _ in module.named_parameters()]

    def function(*values):
        given = dict(zip(names, values, strict=False))
        return torch.func.functional_call(module, given, values[len(names) :])

    own = [p.detach().requires_grad_() for p in module.parameters()]
    inputs = [x.requires_grad_() for x in inputs]
    aot_function(function, fw_compiler=keep, bw_compiler=keep)(*own, *inputs).sum().backward()
    return seen[1], len(names)


def operators(gm):
    return [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]


def halves_of(module, *inputs):
    backward, count = backward_of(module, *inputs)
    return cut(backward, range(count))


def test_the_gradient_of_the_input_is_in_the_first_half_and_those_of_the_weights_in_the_second():
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    halves = halves_of(module, torch.randn(4, 3))
    assert halves.gives == ([4], [0, 1, 2, 3])
    assert operators(halves.first).count("mm.default") == 2
    assert operators(halves.second).count("mm.default") == 2
    assert "tanh_backward.default" in operators(halves.first)
    assert "tanh_backward.default" not in operators(halves.second)


def test_both_halves_together_give_what_the_whole_gives():
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    backward, count = backward_of(module, torch.randn(4, 3))
    given = [torch.randn(n.meta["val"].shape) for n in backward.graph.find_nodes(op="placeholder")]
    whole = backward(*given)
    halves = cut(backward, range(count))
    first = halves.first(*(given[i] for i in halves.takes[0]))
    kept = first[len(halves.gives[0]) :]
    second = halves.second(*kept, *(given[i] for i in halves.takes[1]))
    for places, grads in zip(halves.gives, (first, second), strict=True):
        for i, grad in zip(places, grads, strict=False):
            assert torch.equal(grad, whole[i])


def test_the_backward_of_a_convolution_is_taken_apart():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3))
    halves = halves_of(module, torch.randn(2, 2, 8, 8))

    def masks(gm):
        found = gm.graph.find_nodes(
            op="call_function", target=torch.ops.aten.convolution_backward.default
        )
        return [list(node.args[-1]) for node in found]

    assert masks(halves.first) == [[True, False, False]] * 2
    assert masks(halves.second) == [[False, True, True]] * 2


def test_without_gradients_for_later_there_is_no_second_half():
    backward, _ = backward_of(nn.Tanh(), torch.randn(4, 3))
    assert cut(backward, []) is None


def test_the_first_stage_has_nothing_to_do_in_its_first_half():
    backward, count = backward_of(nn.Linear(3, 5), torch.randn(4, 3))
    halves = cut(backward, range(count + 1))  # as if nobody wanted a gradient of the input
    assert operators(halves.first) == []
    assert operators(halves.second).count("mm.default") == 2


class Flat(nn.Module):
    """Its last layers compute on rows of which each row of the batch has five."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.first(x).flatten(0, 1).tanh()) * 2


class Unflat(Flat):
    """The same, and its output has the rows of the batch again."""

    def forward(self, x):
        return super().forward(x).unflatten(0, (-1, 5))


class Counted(Flat):
    """Its second stage is given the number of rows, beside a tensor of so many rows."""

    def __init__(self):
        super().__init__()
        self.mid = nn.Linear(16, 16)

    def forward(self, x):
        rows, length, _ = x.shape
        y = self.mid(self.first(x).view(-1, 16)).view(rows, length, 16).tanh()
        return self.last(y.view(-1, 16)).view(rows, length, 8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("make", "second"), [(Flat, "flatten"), (Unflat, "flatten"), (Counted, "view")]
)
def test_every_graph_has_the_sizes_that_its_inputs_have_as_inputs(make, second):
    """A compiler has to know all symbols in shapes of inputs, and "rows * 5" alone tells none."""
    unknown, symbolic = [], []

    def backend(gm, inputs):
        shapes = [each.shape for each in inputs if isinstance(each, torch.Tensor)]
        sizes = [size for shape in shapes for size in shape] + list(inputs)
        exprs = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
        known = {expr for expr in exprs if expr.is_Symbol}
        unknown.extend(expr for expr in exprs if expr.free_symbols - known)
        symbolic.extend(exprs)
        return gm.forward

    x = torch.randn(8, 5, 8)
    with fxpipe.compile(
        make(),
        ["cpu"] * 2,
        chunks=4,
        partition=[second],
        schedule="zb_h1",
        loss_fn=lambda output, target: (output.view_as(target) - target).square().mean(),
        stage_backend=backend,
    ) as pipe:
        for rows in (8, 6):  # sizes are symbols once there have been two
            pipe.step(x[:rows], target=x[:rows])
        assert "runs as it is" not in str(pipe.report())
    assert symbolic and unknown == []


def test_a_step_runs_second_halves_when_the_schedule_says_so():
    """A backend sees each graph that runs: the second halves are run apart from the first."""
    ran = []

    def backend(gm, inputs):
        number = backend.count = backend.count + 1

        def run(*args):
            ran.append(number)
            return gm.forward(*args)

        return run

    backend.count = 0
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
    x = torch.randn(8, 8)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=4,
        partition=["2"],
        schedule="zb_h1",
        loss_fn=nn.functional.mse_loss,
        stage_backend=backend,
    ) as pipe:
        pipe.step(x, target=x)
        code = [n.name for n in pipe.step_graph.graph.nodes if n.target is fxpipe.ops.weight_grad]
    assert code  # the schedule has second halves
    assert all(p.grad is not None for p in model.parameters())
    halved = len(code)
    counts = sorted(ran.count(number) for number in set(ran))
    assert counts.count(halved) >= 2, counts
