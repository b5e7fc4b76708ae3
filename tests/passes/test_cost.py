import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.graph import COST, stage_nodes
from passes import Alias, AnalyticCost
from passes.cost import Roofline
from tests.zoo import MODELS


def costs(model, *inputs, device=None):
    gm = Alias(inputs)(fx.symbolic_trace(model))
    AnalyticCost(device or Roofline())(gm)
    return {n.name: n.meta[COST] for n in stage_nodes(gm.graph)}


def test_a_linear_costs_what_its_sizes_say():
    device = Roofline(flops_per_s=1e9, bytes_per_s=1e12, launch_s=0)
    cost = costs(nn.Sequential(nn.Linear(8, 16, bias=False)), torch.ones(4, 8), device=device)["_0"]
    assert cost.flops == 2 * 4 * 8 * 16
    assert cost.param_bytes == 8 * 16 * 4
    assert cost.output_bytes == 4 * 16 * 4
    assert cost.activation_bytes == 4 * 8 * 4, "the input, for the weight's gradient"
    assert cost.forward_s == pytest.approx(2 * 4 * 8 * 16 / 1e9)
    assert cost.backward_s == 2 * cost.forward_s


def test_what_moves_more_than_it_computes_is_bound_by_bandwidth():
    device = Roofline(flops_per_s=1e15, bytes_per_s=1e6, launch_s=0)
    cost = costs(nn.Sequential(nn.ReLU()), torch.ones(1000), device=device)["_0"]
    assert cost.forward_s == pytest.approx(8000 / 1e6), "4000 bytes read, 4000 written"


def test_without_a_gradient_nothing_is_kept_and_there_is_no_backward():
    cost = costs(nn.Sequential(nn.ReLU()), torch.ones(10))["_0"]
    assert (cost.backward_s, cost.activation_bytes) == (0, 0)


def test_a_shared_parameter_is_counted_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [c.param_bytes for c in costs(model, torch.ones(2, 4)).values()] == [64, 0]


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_flop_counter(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(4)
    with FlopCounterMode(display=False) as counter:
        model(*x)
    assert sum(c.flops for c in costs(model, *x).values()) == counter.get_total_flops()
