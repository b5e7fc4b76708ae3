"""A model's own checks of values run in the earliest stage that has the values."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir.graph import STAGE
from fxpipe.ir.printing import format_graph
from passes import Alias, EarlyChecks
from tests.zoo import outputs_of_loop

IDS = torch.arange(12).view(4, 3) % 10


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("most", torch.tensor(10))
        self.least = nn.Parameter(torch.tensor(-100.0))


def moved(model: nn.Module, **stages: int) -> fx.GraphModule:
    """The graph of a model after the pass. ``stages``: where a cut has put nodes, by their names;
    each other node is in the stage of the node before it."""
    gm = Alias((IDS,))(fx.symbolic_trace(model))
    stage = 0
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            stage = node.meta[STAGE] = stages.pop(node.name, stage)
    assert not stages, "nodes that are not in the graph"
    return EarlyChecks()(gm)


def stages_of(gm: fx.GraphModule) -> dict[str, int]:
    return {node.name: node.meta[STAGE] for node in gm.graph.nodes if STAGE in node.meta}


def test_a_check_and_what_is_computed_for_it_go_to_where_its_value_is_made():
    class Checked(Layers):
        def forward(self, ids: Tensor) -> Tensor:
            torch._assert_async((ids < self.most).all(), "ids out of range")
            x = self.a(self.embed(ids))
            torch._assert_async(x.abs().max() < 100, "too large")
            return self.b(x)

    gm = moved(Checked(), lt=0, all_1=1, _assert_async=2, embed=0, a=1, abs_1=2, b=2)
    assert_expected_inline(
        format_graph(gm),
        """\
ids: input
most = self.most
lt = lt(ids, most)  # stage 0
all_1 = .all(lt)  # stage 0
_assert_async = _assert_async(all_1, 'ids out of range')  # stage 0
embed = embed(ids)  # stage 0
a = a(embed)  # stage 1
abs_1 = .abs(a)  # stage 1
max_1 = .max(abs_1)  # stage 1
lt_1 = lt(max_1, 100)  # stage 1
_assert_async_1 = _assert_async(lt_1, 'too large')  # stage 1
b = b(a)  # stage 2
return b
""",
    )


def test_a_check_of_several_values_waits_for_the_last_and_the_others_are_not_sent_ahead():
    class Several(Layers):
        def forward(self, ids: Tensor) -> Tensor:
            known = ids < 10
            x = self.a(self.embed(ids))
            torch._assert_async((known & (x.sum(-1) < 9)).all(), "wrong")
            return self.b(x)

    found = stages_of(moved(Several(), lt=0, embed=0, a=1, sum_1=2))
    assert found == {
        **{"lt": 0, "embed": 0, "a": 1, "b": 2},
        **{"sum_1": 1, "lt_1": 1, "and_": 1, "all_1": 1, "_assert_async": 1},
    }
    late = stages_of(moved(Several(), lt=2, embed=0, a=1, sum_1=2))
    assert late["lt"] == 1, "no earlier than it is needed"


def test_what_others_need_or_what_has_a_place_of_its_own_stays():
    class Stays(Layers):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            y = x.abs()
            torch._assert_async(y.max() < 9, "the result needs it, too")
            torch._assert_async(self.a(x).max() < 9, "has parameters")
            torch._assert_async(x.max() > self.least, "has a parameter")
            torch._assert_async(torch.rand_like(x).max() < 9, "draws")
            z = x.clone()
            torch._assert_async(z.mul_(2).max() < 9, "writes")
            return self.b(y)

    gm = moved(Stays(), embed=0, abs_1=1, max_1=2)
    assert_expected_inline(
        format_graph(gm),
        """\
ids: input
embed = embed(ids)  # stage 0
abs_1 = .abs(embed)  # stage 1
max_1 = .max(abs_1)  # stage 1
lt = lt(max_1, 9)  # stage 1
_assert_async = _assert_async(lt, 'the result needs it, too')  # stage 1
a = a(embed)  # stage 2
max_2 = .max(a)  # stage 2
lt_1 = lt(max_2, 9)  # stage 2
_assert_async_1 = _assert_async(lt_1, 'has parameters')  # stage 2
max_3 = .max(embed)  # stage 2
least = self.least
gt = gt(max_3, least)  # stage 2
_assert_async_2 = _assert_async(gt, 'has a parameter')  # stage 2
rand_like = rand_like(embed)  # stage 2
max_4 = .max(rand_like)  # stage 2
lt_2 = lt(max_4, 9)  # stage 2
_assert_async_3 = _assert_async(lt_2, 'draws')  # stage 2
clone = .clone(embed)  # stage 2
mul_ = .mul_(clone, 2)  # stage 2
max_5 = .max(mul_)  # stage 2
lt_3 = lt(max_5, 9)  # stage 2
_assert_async_4 = _assert_async(lt_3, 'writes')  # stage 2
b = b(abs_1)  # stage 2
return b
""",
    )


def test_results_of_one_node_stay_together():
    class Parts(Layers):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            values, places = x.max(-1)
            torch._assert_async((values < 9).all(), "wrong")
            y = self.a(x)
            torch._assert_async((places + y.sum(-1) < 9).all(), "wrong")
            return self.b(y)

    found = stages_of(moved(Parts(), embed=0, max_1=2, a=1, add=2))
    assert {found[name] for name in ("max_1", "getitem", "getitem_1", "_assert_async")} == {0}
    assert {found[name] for name in ("add", "_assert_async_1")} == {1}


def test_no_stage_is_left_without_nodes():
    class Last(Layers):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            torch._assert_async(x.max() < 9, "wrong")
            return x

    found = stages_of(moved(Last(), embed=0, max_1=1))
    assert found == {"embed": 0, "max_1": 1, "lt": 1, "_assert_async": 1}


class Guarded(Layers):
    """Refuses ids for which its first layer has no row."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.max() >= 10:
            raise ValueError("ids out of range")
        return self.b(self.a(self.embed(ids))).mean((1, 2))


def late(gm: fx.GraphModule) -> dict[str, int]:
    """A cut that has the check in the last stage."""
    names = ("ge", "wrap_with_set_grad_enabled")
    (check,) = (node.name for node in gm.graph.nodes if node.name in names)
    return {"embed": 0, "a": 1, check: 2, "b": 2}


class WithoutGradients(Layers):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            if ids.max() >= 10:
                raise ValueError("ids out of range")
        return self.b(self.a(self.embed(ids))).mean((1, 2))


@pytest.mark.parametrize("kind", [Guarded, WithoutGradients])
@pytest.mark.parametrize("partition", ["auto", late])
def test_the_models_own_error_comes_ahead_of_that_which_it_guards_against(kind, partition):
    model = kind()
    pipe = fxpipe.compile(
        model, ["cpu"] * 3, chunks=2, partition=partition, loss_fn=nn.functional.mse_loss
    )
    with pipe:
        assert torch.equal(pipe(IDS), torch.cat(outputs_of_loop(model, (IDS,), 2)))
        for wrong in (IDS + 1, IDS.flip(0) + 1):  # in either micro-batch
            with pytest.raises(RuntimeError, match="check of the model's own has failed") as error:
                pipe(wrong)
            assert "ids.max() >= 10" in str(error.value)
            with pytest.raises(RuntimeError, match="check of the model's own has failed"):
                pipe.step(wrong, target=torch.zeros(4))
