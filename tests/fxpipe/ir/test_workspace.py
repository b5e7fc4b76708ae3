"""What stages need while they run. Numbers are values of the batch's size, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.graph import nodes_of_stages
from fxpipe.ir.load import Living
from fxpipe.ir.workspace import StageWorkspace, sent_gradients, stage_workspaces
from fxpipe.planning.estimates import stage_memory

ROWS, WIDTH = 1024, 64
VALUE = 4 * ROWS * WIDTH


def workspaces(model, partition, chunks=1):
    x = torch.randn(ROWS, WIDTH)
    options = {"partition": partition, "chunks": chunks, "check": False, "costs": "analytic"}
    with fxpipe.compile(model, ["cpu"] * (1 + len(partition)), **options) as pipe:
        pipe.prepare(x)
        return stage_workspaces(pipe.stage_graph)


def values(workspace):
    """In values; a gradient of weights, which is much smaller, does not count."""
    return StageWorkspace(*(round(each / VALUE) for each in vars(workspace).values()))


class Residual(nn.Module):
    """A layer saves its input x and t = tanh(linear(x)), and returns x + t."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("chunks", [1, 4])
def test_values_that_are_used_later_and_gradients_are_there_beside_what_is_saved(chunks):
    first, second = workspaces(Residual(4), ["layers.2"], chunks)
    # Forward: the result, beside all that is saved. If the stage is run again: beside its input,
    # two t, the second layer's x, and either this layer's linear or the result; the result where
    # linears are kept as well.
    # Backward: the gradient of the result, which stays, and tanh's; then t and tanh's are free, so
    # that there is room for both gradients of x and their sum. In the first half there is not, as
    # it keeps the gradient of each linear's value in the place of t.
    expected = StageWorkspace(
        forward=1, again=4, selective=4, rerun=1, backward=2, half=3, kept_inputs=1, between=4
    )
    assert values(second) == expected
    assert values(first).forward == expected.forward


def test_a_chain_needs_its_value_and_the_next_one():
    _, second = workspaces(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), ["3"])
    # Each linear saves its input: if the stage is run again, two of these and the result are there
    # beside the first one, which is the stage's; where results of products are kept, these are. The
    # gradient of a linear's value and that of its input are there at the same time; the saved input
    # is free only then.
    # The first half keeps these inputs, and the gradients of all three values, beside which it
    # makes that of its input.
    assert values(second) == StageWorkspace(
        forward=1, again=3, rerun=1, backward=2, half=4, kept_inputs=1, between=6
    )


class Doubled(nn.Module):
    """Computes four values, saves none of them, and returns their sum."""

    def forward(self, x):
        parts = [x * i for i in range(4)]
        return parts[0] + parts[1] + parts[2] + parts[3]


def test_what_a_stage_does_not_save_is_counted_while_it_is_there():
    _, second = workspaces(nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubled()), ["1"])
    # Forward: x, which the stage's caller holds, its four multiples, and the sum of two. Backward:
    # the gradient of the result, which is that of each multiple as well; that of x; what is being
    # added to it.
    assert values(second) == StageWorkspace(
        forward=6, again=5, selective=5, rerun=5, backward=3, half=3
    )


class Joined(nn.Module):
    """A skip joins the second layer's result, so that its gradient is a part of a larger one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        skip = self.first(x)
        return self.last(torch.cat([self.second(skip.tanh()), skip], 1))


def test_a_gradient_that_is_sent_back_may_be_a_view_of_a_larger_one():
    options = {"partition": ["second"], "chunks": 1, "check": False, "costs": "analytic"}
    with fxpipe.compile(Joined(), ["cpu"] * 2, **options) as pipe:
        pipe.prepare(torch.randn(ROWS, WIDTH))
        graph, layout = pipe.stage_graph, pipe.skip_layout
        _, second = nodes_of_stages(graph)
        sent = {name: list(sizes.values()) for name, sizes in sent_gradients(second).items()}
        memory = stage_memory([stage.cost for stage in pipe.stages], layout, graph)
    assert sent == {"first": [2 * VALUE], "tanh": [VALUE]}, "the skip's, and that of the layer"
    assert memory[1].views == {0: VALUE} and memory[0].views == {}


@pytest.mark.parametrize("chunks", [1, 4])
def test_each_micro_batch_makes_a_whole_gradient_of_a_weight_however_few_rows_it_has(chunks):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16 * ROWS))
    _, second = workspaces(model, ["1"], chunks)
    weight, result = 4 * WIDTH * 16 * ROWS, 4 * ROWS * 16 * ROWS
    assert second.weights == chunks * weight
    # A whole backward makes it beside the gradients of the result and of the input. The first half
    # of a backward does not make it.
    assert second.backward == result + VALUE + chunks * weight
    assert second.half == result + VALUE


def test_the_memory_of_what_is_made_is_counted_as_long_as_it_is_there():
    living = Living()
    given = torch.ones(256)
    first = given * 2
    living.note(first, given)
    second = first + 1
    living.note(second, first)
    view = second[:10]
    living.note(view, second)
    assert (living.now, living.most) == (2048, 2048)
    del first, second
    assert living.now == 1024, "the view needs the memory that it is a part of"
    del view
    assert (living.now, living.most) == (0, 2048)


class TwoLayers(nn.Module):
    """Two layers, which may have one weight."""

    def __init__(self, is_tied):
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_the_gradient_of_a_shared_weight_does_not_wait_for_the_second_half_of_a_backward():
    (_, tied), (_, apart) = (workspaces(TwoLayers(is_tied), ["tanh"]) for is_tied in (True, False))
    # The layer's weight is apart: until its gradient is made, the first half keeps what tanh has
    # returned, and the gradient of the result.
    assert values(apart).between == 2 and values(tied).between == 0
    assert values(tied).backward == values(tied).half == values(apart).backward


class Halved(nn.Module):
    """A layer of which a later stage takes one half, a view."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x)[:, :WIDTH])


def test_the_gradient_of_a_result_is_as_large_as_the_result_which_may_be_a_view():
    first, _ = workspaces(Halved(), ["last"])
    assert values(first).backward == 3, "that of the half, and that of the layer's whole value"
