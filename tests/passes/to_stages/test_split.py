import copy
import io

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from fxpipe.ir.graph import STAGE, stage_nodes
from fxpipe.ir.printing import format_graph
from passes import Alias, Partition
from passes.to_stages.split import Split, SplitError


class SkipNet(nn.Module):
    """A value with a near and a far user, a direct parameter in two stages, two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, late):
        a = self.a(x) * self.scale
        b = self.b(a).relu()
        c = self.c(b + late) * self.scale
        return {"sum": c + a, "shift": self.shift, "x": x}


LABELS = dict(a=0, mul=0, b=1, relu=1, add=2, c=2, mul_1=2, add_1=2)


def labelled(model, labels):
    gm = fx.symbolic_trace(model)
    for node in stage_nodes(gm.graph):
        if node.name in labels:
            node.meta[STAGE] = labels[node.name]
    return gm


def split_skip_net():
    torch.manual_seed(0)
    model = SkipNet()
    return model, Split()(labelled(model, LABELS))


def test_each_stage_is_one_call_and_a_late_input_goes_straight_to_its_stage():
    _, stages = split_skip_net()
    assert_expected_inline(
        format_graph(stages),
        """\
x: input
late: input
stage_0 = stage_0(x)  # stage 0
stage_1 = stage_1(stage_0)  # stage 1
stage_2 = stage_2(stage_1, late, stage_0)  # stage 2
shift = self.shift
return {'sum': stage_2, 'shift': shift, 'x': x}
""",
    )


def test_a_stage_takes_parameters_in_from_where_it_uses_them():
    _, stages = split_skip_net()
    assert_expected_inline(
        format_graph(stages.stage_2),
        """\
relu: input
late: input
mul: input
add = add(relu, late)  # stage 2
c = c(add)  # stage 2
scale = self.scale
mul_1 = mul(c, scale)  # stage 2
add_1 = add(mul_1, mul)  # stage 2
return add_1
""",
    )


def test_a_stage_with_several_results_gives_a_tuple():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            a, b = torch.split(self.body(x), 1, dim=1)
            return a * b

    gm = labelled(Two(), dict(body_0=0, body_1=0, body_2=0, split=0, getitem=0, getitem_1=0, mul=1))
    assert_expected_inline(
        format_graph(Split()(gm)),
        """\
x: input
stage_0 = stage_0(x)  # stage 0
getitem = stage_0[0]  # stage 0
getitem_1 = stage_0[1]  # stage 0
stage_1 = stage_1(getitem, getitem_1)  # stage 1
return stage_1
""",
    )


def test_outputs_and_gradients_are_the_models_bitwise():
    model, stages = split_skip_net()
    stages.graph.lint()
    x, late = torch.randn(4, 3), torch.randn(4, 3)
    results = []
    for module in (model, stages):
        model.zero_grad()
        out = module(x, late)
        out["sum"].square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((out, grads))
    (expected, expected_grads), (got, got_grads) = results
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    assert all(torch.equal(got_grads[k], expected_grads[k]) for k in expected_grads)


def test_parameters_stay_the_same_objects_under_the_same_names():
    model, stages = split_skip_net()
    own = dict(model.named_parameters())
    for stage in (stages.stage_0, stages.stage_1, stages.stage_2):
        for name, parameter in stage.named_parameters():
            assert parameter is own[name]
    assert {n for n, _ in stages.stage_1.named_parameters()} == {"b.weight", "b.bias"}
    assert stages.shift is model.shift


def test_the_stage_graph_survives_deepcopy_and_saving():
    _, stages = split_skip_net()
    inputs = torch.randn(2, 3), torch.randn(2, 3)
    file = io.BytesIO()
    torch.save(stages, file)
    file.seek(0)
    for other in (copy.deepcopy(stages), torch.load(file, weights_only=False)):
        assert torch.equal(other(*inputs)["sum"], stages(*inputs)["sum"])


def test_a_value_that_flows_backwards_is_refused():
    with pytest.raises(SplitError, match=r"'relu' in stage 0 needs 'b' from the later stage 1"):
        Split()(labelled(SkipNet(), LABELS | {"relu": 0}))


def test_a_missing_label_is_refused():
    with pytest.raises(SplitError, match=r"node 'b' has no stage \(1 such nodes\)"):
        Split()(labelled(SkipNet(), {k: v for k, v in LABELS.items() if k != "b"}))


def test_a_gap_in_the_stage_numbers_is_refused():
    labels = {k: v * 2 for k, v in LABELS.items()}
    with pytest.raises(SplitError, match=r"without gaps, got \[0, 2, 4\]"):
        Split()(labelled(SkipNet(), labels))


def test_a_stage_writes_to_a_clone_of_what_it_receives_and_detaches_what_has_no_backward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            a, mask = self.a(x), self.b(x)
            return self.relu(a) * (mask > 0)

    x = torch.ones(2, 3)
    gm = Alias((x,))(fx.symbolic_trace(Model()))
    gm = Split()(Partition(2, ["relu"])(gm))
    assert_expected_inline(
        format_graph(gm.stage_0) + format_graph(gm.stage_1),
        """\
x: input
a = a(x)  # stage 0
b = b(x)  # stage 0
detach = detach(b)
return (a, detach)
a: input
b: input
clone = clone(a)
relu = relu(clone)  # stage 1
gt = gt(b, 0)  # stage 1
mul = mul(relu, gt)  # stage 1
return mul
""",
    )
