import re

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.inspect.draw import draw_step
from tests.fxpipe.inspect.draw.test_levels import clusters, edges, laid_out
from tests.zoo import Chain


def stepped(schedule="1f1b", **options):
    x = torch.randn(6, 3)
    pipe = fxpipe.compile(
        Chain(4, {0: (3,)}),
        ["cpu"] * options.pop("lanes", 4),
        chunks=3,
        schedule=schedule,
        loss_fn=lambda output, target: output.mean(),
        **options,
    )
    pipe.step(x)
    return pipe


def place(source):
    """Of each action: its column and its row, from the upper left."""
    pattern = r'^\s*"?(\d[FBIWR]\d)"? \[label=.*?pos="(.*?),(.*?)"'
    found = {name: tuple(map(float, at)) for name, *at in re.findall(pattern, source, re.M)}
    columns = sorted({x for x, _ in found.values()})
    rows = sorted({-y for _, y in found.values()})
    return {name: (columns.index(x), rows.index(-y)) for name, (x, y) in found.items()}


def test_actions_stand_in_the_rows_of_their_lanes_as_early_as_they_can_be():
    with stepped(partition=["b", "c", "d"]) as pipe:
        source = pipe.draw("step").source
    assert list(clusters(source)) == [*(f"cluster_lane_{i}" for i in range(4)), "cluster_legend"]
    found = place(source)
    assert len(found) == 4 * 3 * 2
    assert all(found[f"{stage}F0"] == (stage, stage) for stage in range(4))
    assert found["3B0"] == (4, 3), "1F1B: the last stage goes back at once"
    assert [found[f"{stage}B0"][0] for stage in range(4)] == [7, 6, 5, 4]


def test_values_go_down_and_gradients_come_back_dashed():
    with stepped(partition=["b", "c", "d"]) as pipe:
        lines = edges(pipe.draw("step").source)
    forward = {(f"{j}F{i}", f"{j + 1}F{i}") for i in range(3) for j in range(3)}
    skips = {(f"1F{i}", f"3F{i}") for i in range(3)}
    back = {tuple(end.replace("F", "B") for end in ends[::-1]) for ends in forward | skips}
    assert set(lines) == forward | skips | back
    assert all((lines[ends]["style"] == "dashed") is (ends in back) for ends in lines)
    thick = {ends for ends, line in lines.items() if line["penwidth"] != "1"}
    assert {end[0] for ends in thick for end in ends} == {"1", "3"} and len(thick) == 6


def test_stages_of_one_lane_share_a_row_and_nothing_is_drawn_between_them():
    with stepped("zbv", lanes=2, partition=["b", "c", "d"]) as pipe:
        source = pipe.draw("step").source
    assert 'label="stages 0, 3 · cpu"' in source and 'label="stages 1, 2 · cpu"' in source
    assert {row for _, row in place(source).values()} == {0, 1}
    assert ("1F0", "2F0") not in edges(source) and ("0F0", "1F0") in edges(source)
    assert "W: gradients of the weights" in source


def test_what_is_computed_again_has_a_box_ahead_of_its_backward():
    with stepped(partition=["b", "c", "d"], checkpoint="except_last") as pipe:
        source = pipe.draw("step").source
    at = place(source)
    assert {f"{stage}R{i}" for stage in range(4) for i in range(2)} == {n for n in at if "R" in n}
    assert at["1F0"] < at["1R0"] < at["1B0"] and at["3F0"] < at["3R0"] < at["3B0"]
    assert "R: activations again, by a second forward or from the host" in source


def test_without_a_placement_each_stage_has_a_row():
    with stepped("zbv", lanes=2, partition=["b", "c", "d"]) as pipe:
        source = draw_step(pipe.step_graph, ["cpu"] * 4).source
    assert len(clusters(source)) == 4 + 1


def test_a_part_of_it_is_drawn_in_full():
    with stepped(partition=["b", "c", "d"]) as pipe:
        source = pipe.draw("step", stage=1, microbatch=2).source
        assert list(clusters(source)) == [
            "cluster_stage_1_mb_2_forward",
            "cluster_stage_1_mb_2_backward",
            "cluster_legend",
        ]
        nodes = [
            node.name
            for node in pipe.step_graph.graph.nodes
            if (node.meta.get("stage"), node.meta.get("microbatch")) == (1, 2)
        ]
        assert all(f"\t{name} [" in source for name in nodes) and "forward_s1_mb2" in nodes
        with pytest.raises(ValueError, match="no node is of stage 7: there are stages 0 to 3"):
            pipe.draw("step", stage=7)
        with pytest.raises(ValueError, match="no micro-batches at level 'model'"):
            pipe.draw("model", microbatch=1)


def test_a_stage_of_the_model_says_where_its_values_come_from_and_go():
    with stepped(partition=["b", "c", "d"]) as pipe:
        pipe.prepare(torch.randn(6, 3))
        source = pipe.draw("stage", stage=1).source
    assert list(clusters(source)) == ["cluster_stage_1", "cluster_legend"]
    lines = edges(source)
    assert set(lines) == {("from stage 0 / stage 1", "b"), ("b", "to stage 2 / stage 1")}
    assert r'label="from stage 0\na"' in source


class Passing(nn.Module):
    """Gives what its first stage has made, beside what the last one makes of it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        a = self.a(x)
        kept = torch.relu(a)
        return kept, self.c(torch.tanh(self.b(a)))


def test_what_only_the_loss_uses_goes_to_the_last_stages_forward():
    pipe = fxpipe.compile(
        Passing(),
        ["cpu"] * 3,
        chunks=1,
        partition=["b", "c"],
        loss_fn=lambda output, target: sum(part.mean() for part in output),
        example_inputs=(torch.randn(2, 3),),
    )
    assert set(edges(pipe.draw("step").source)) == {
        *(("0F0", "1F0"), ("1F0", "2F0"), ("0F0", "2F0")),
        *(("2B0", "1B0"), ("1B0", "0B0"), ("2B0", "0B0")),
    }


def test_a_micro_batch_goes_down_in_its_forward_and_on_down_in_its_backward():
    with stepped(partition=["b", "c", "d"]) as pipe:
        found = laid_out(pipe.draw("step", microbatch=0))
    way = [f"stage {i}, mb 0, forward" for i in range(4)]
    way += [f"stage {i}, mb 0, backward" for i in reversed(range(4))]
    heights = [found[title][1] for title in way]
    assert heights == sorted(heights) and len(set(heights)) == 8
