from __future__ import annotations

import traceback

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from fxpipe.runtime.source import _Source
from tests.zoo import Chain, after

X = torch.ones(4, 3)


def source(program, lane):
    return "\n".join(_Source(lane, program.lanes[lane], [], False, False).lines)


def test_a_lane_is_a_python_function():
    gm = after("dependencies", Chain(2), (X,), ["b"], chunks=1)
    assert_expected_inline(
        source(lower(gm, placement=[0, 1]), 1),
        """\
def lane(call, values, time):
    arrived = call.inboxes[1].arrived
    take = call.inboxes[1].take
    post_caller = call.inboxes[-1].post
    del values
    if node_0 not in arrived: yield node_0
    a_s0_mb0 = take(node_0)
    if call.error is not None: call.drop()
    copy_s1_mb0 = function_1((a_s0_mb0, ), 'cpu/copy', 'cpu/copy')
    del a_s0_mb0
    if call.error is not None: call.drop()
    wait_s1_mb0 = function_2(copy_s1_mb0, 'cpu/copy', 'cpu/compute')
    del copy_s1_mb0
    a_s1_mb0 = wait_s1_mb0[0]
    del wait_s1_mb0
    if call.error is not None: call.drop()
    stage_1_mb0 = function_3(a_s1_mb0)
    del a_s1_mb0
    if node_4 not in arrived: yield node_4
    x_parts = take(node_4)
    if call.error is not None: call.drop()
    b_out = function_5((stage_1_mb0, ), 0, x_parts, 0)
    post_caller(node_6, b_out)
    del stage_1_mb0, x_parts, b_out""",
    )


def test_arguments_may_be_nested_and_names_of_values_may_be_those_of_the_function():
    graph = fx.Graph()
    call, values = graph.placeholder("call"), graph.placeholder("values")

    def both(pair, *, scale):
        return pair["a"][0] * scale[1] + pair["b"]

    time = graph.create_node(
        "call_function",
        both,
        ({"a": [call, 1.5], "b": values},),
        {"scale": (float("inf"), call)},
        name="time",
    )
    graph.output([time, 2])
    gm = fx.GraphModule({}, graph)
    given = torch.tensor(3.0), torch.tensor(4.0)
    assert run_inline(lower(gm), given) == [torch.tensor(13.0), 2] == gm(*given)


def test_a_traceback_shows_the_line_of_the_lane():
    class Fails(nn.Module):
        def forward(self, x):
            raise LookupError("the model's own error")

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Fails) or super().is_leaf_module(m, name)

    graph = Tracer().trace(model := nn.Sequential(Fails()))
    with pytest.raises(LookupError) as caught:
        run_inline(lower(fx.GraphModule(model, graph)), [X])
    lines = "".join(traceback.format_exception(caught.value))
    assert "_0 = function_0(input_1)" in lines
    assert caught.value.__notes__ == ["in fxpipe: _0 = 0(input_1)"]
