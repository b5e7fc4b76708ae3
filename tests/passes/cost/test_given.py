from __future__ import annotations

import json

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, stage_nodes
from passes import Alias, AnalyticCost
from passes.cost.choice import cost_pass
from passes.cost.given import GivenCost, Profile, ProfileError
from passes.cost.measured import MeasuredCost
from tests.zoo import Chain, Tied


def traced(model=None):
    return Alias((torch.ones(2, 3),))(fx.symbolic_trace(model or Chain(3)))


def costs(gm):
    return {n.name: n.meta[COST] for n in stage_nodes(gm.graph)}


def test_seconds_are_given_by_name_and_the_rest_takes_none():
    found = costs(GivenCost({"a": 3.0, "c": 6.0})(traced()))
    assert {name: cost.seconds for name, cost in found.items()} == {"a": 3.0, "b": 0.0, "c": 6.0}
    assert (found["c"].forward_s, found["c"].backward_s) == (2.0, 4.0)


def test_bytes_and_flops_are_those_of_the_estimate():
    given, estimated = costs(GivenCost({"a": 3.0})(traced())), costs(AnalyticCost()(traced()))
    assert given["a"].flops == estimated["a"].flops
    assert given["b"].param_bytes == estimated["b"].param_bytes


def test_what_has_no_backward_takes_all_its_time_forward():
    model = nn.Sequential(nn.ReLU())
    assert costs(GivenCost({"_0": 3.0})(traced(model)))["_0"].forward_s == 3.0


def test_the_seconds_of_a_module_are_shared_among_its_nodes():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    found = costs(GivenCost({"0": 4.0, "0.1": 1.0})(traced(model)))
    assert sum(found[name].seconds for name in ("_0_0",)) == pytest.approx(
        4 - 4 * share(model), rel=1e-6
    )
    assert found["_0_1"].seconds == 1.0, "the longer path wins"


def share(model):
    """Of the time of module "0", what its second linear takes by estimate."""
    found = costs(AnalyticCost()(traced(model)))
    return found["_0_1"].seconds / (found["_0_0"].seconds + found["_0_1"].seconds)


def test_a_whole_cost_may_be_given():
    cost = Cost(forward_s=1.0, param_bytes=7, again_s=0.5, product_bytes=8)
    assert costs(GivenCost({"b": cost})(traced()))["b"] == cost


def test_what_a_given_cost_does_not_say_of_products_is_estimated():
    estimate = costs(AnalyticCost()(traced()))["b"]
    found = costs(GivenCost({"b": Cost(forward_s=2.0)})(traced()))["b"]
    assert found.product_bytes == estimate.product_bytes
    assert found.again_s == pytest.approx(2.0 * estimate.again_s / estimate.forward_s)


def test_a_profile_is_what_it_was_when_it_has_been_saved_and_loaded(tmp_path):
    gm = AnalyticCost()(traced())
    Profile.of(gm, "h200").save(tmp_path / "chain.json")
    loaded = Profile.load(tmp_path / "chain.json")
    assert loaded == Profile.of(gm, "h200")
    assert costs(GivenCost(loaded)(traced())) == costs(gm)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "costs": 3}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "no.json").write_text(text)
    with pytest.raises(ProfileError, match=r"no.json is no profile: .*Profile.save has written"):
        Profile.load(tmp_path / "no.json")


def test_a_profile_of_another_format_is_refused(tmp_path):
    Profile({"a": Cost()}).save(tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text()) | {"format": 99}
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="format 99; this is format 1: measure again"):
        Profile.load(tmp_path / "p.json")


def test_a_profile_of_another_model_is_refused():
    profile = Profile.of(AnalyticCost()(traced(Chain(2))))
    with pytest.raises(ProfileError, match=r"no cost of 'c' \(1 such node of 3\); measure this"):
        GivenCost(profile)(traced())


def test_a_name_that_the_model_has_not_is_refused():
    with pytest.raises(
        ProfileError, match="costs names 'q', but the model graph has no such module or node"
    ):
        GivenCost({"q": 1.0})(traced())


def test_a_cost_for_several_nodes_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(ProfileError, match="a Cost for '0', which is 2 nodes: give seconds"):
        GivenCost({"0": Cost()})(traced(model))


def test_the_pass_is_known_by_what_is_asked_for(tmp_path):
    Profile.of(AnalyticCost()(traced())).save(tmp_path / "p.json")
    assert isinstance(cost_pass("analytic", ()), AnalyticCost)
    assert isinstance(cost_pass("measured", ()), MeasuredCost)
    assert isinstance(cost_pass({"a": 1.0}, ()), GivenCost)
    assert isinstance(cost_pass(tmp_path / "p.json", ()), GivenCost)
    with pytest.raises(ValueError, match='costs is \'guessed\': give "analytic", "measured", the'):
        cost_pass("guessed", ())


class Dropped(Tied):
    """A model with a tied weight, that draws random numbers."""

    def forward(self, tokens):
        return nn.functional.dropout(super().forward(tokens), 0.1)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu", "cpu:0"]])
def test_the_profile_of_a_pipeline_is_one_of_its_model(devices):
    """Passes have given nodes a seed, and brought a shared parameter to another device."""
    model, tokens = Dropped(), torch.randint(11, (4, 4))
    with fxpipe.compile(model, devices, chunks=2, example_inputs=(tokens,)) as pipe:
        profile = Profile.of(pipe.model_graph)
    with fxpipe.compile(model, devices, chunks=2, costs=profile) as again:
        again.prepare(tokens)
        assert Profile.of(again.model_graph).costs == profile.costs
