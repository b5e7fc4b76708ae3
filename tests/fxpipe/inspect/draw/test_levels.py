import os
import re

import graphviz
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.inspect.draw import SKIP_COLOURS, draw_model, draw_pipeline, draw_stages, render_svg
from fxpipe.ir.cost import Cost
from tests.zoo import MLP, UNet, images

TWO = ["cuda:0", "cuda:1"]
FOUR = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


class LongSkip(nn.Module):
    """Four stages; what the first gives is used again in the last only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        a = self.a(x)
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(a)))))) + a


ROOM = " " * 6  # behind every line, for wider fonts


def mlp():
    return fxpipe.compile(
        MLP(depth=2),
        ["cpu"] * 2,
        chunks=3,
        checkpoint="except_last",
        example_inputs=(torch.randn(6, 12),),
    )


def long_skip():
    return fxpipe.compile(
        LongSkip(),
        ["cpu"] * 4,
        chunks=2,
        partition=["b", "c", "d"],
        example_inputs=(torch.randn(4, 3),),
    )


def drawings(pipe, devices):
    costs = [stage.cost for stage in pipe.stages]
    return {
        "model": draw_model(pipe.model_graph),
        "stages": draw_stages(pipe.stage_graph, devices, costs),
        "pipeline": draw_pipeline(pipe.graph_module, devices),
    }


def edges(source):
    """Of visible lines: (tail, head) and the line's attributes."""
    found = {}
    for tail, head, rest in re.findall(
        r"^\s*(\S+|\".*?\") -> (\S+|\".*?\") \[(.*)\]$", source, re.M
    ):
        attributes = dict(re.findall(r'(\w+)=("[^"]*"|[^\s"]+)', rest))
        if attributes["style"] != "invis":
            found[tail.strip('"'), head.strip('"')] = {
                key: value.strip('"') for key, value in attributes.items()
            }
    return found


def clusters(source):
    """The text of each cluster."""
    found = re.findall(r"^\tsubgraph \"?(cluster_[^\"{]*?)\"? \{\n(.*?)^\t\}", source, re.M | re.S)
    return dict(found)


def test_the_model_has_a_cluster_for_each_stage_and_a_box_for_each_node():
    source = draw_model(mlp().model_graph).source
    found = clusters(source)
    assert list(found) == ["cluster_stage_0", "cluster_stage_1", "cluster_legend"]
    assert r'layers_0 [label="layers_0\nlayers.0\nfloat32 [6, 12]"' in found["cluster_stage_0"]
    assert "layers_1 [" in found["cluster_stage_1"]
    assert {("x", "layers_0"), ("layers_0", "tanh"), ("tanh_1", "output")} <= set(edges(source))


def test_in_the_model_only_a_value_that_passes_over_stages_is_thick_and_coloured():
    lines = edges(draw_model(long_skip().model_graph).source)
    thick = {ends for ends, line in lines.items() if float(line["penwidth"]) > 1}
    assert thick == {("a", "add")}
    assert lines["a", "add"]["color"] == SKIP_COLOURS[0]


def test_in_a_step_the_gradient_of_a_skip_passes_over_stages_too():
    pipe = fxpipe.compile(
        LongSkip(),
        ["cpu"] * 4,
        chunks=2,
        partition=["b", "c", "d"],
        loss_fn=nn.functional.mse_loss,
    )
    pipe.step(torch.randn(4, 3), target=torch.randn(4, 3))
    lines = edges(pipe.draw("step", microbatch=0).source)
    thick = {ends for ends, line in lines.items() if float(line["penwidth"]) > 1}
    stages = {tuple(re.search(r"_s(\d)_", end)[1] for end in ends) for ends in thick}
    assert stages == {("0", "3"), ("3", "0")}


def test_parameters_of_the_model_are_small_and_in_the_stage_that_uses_them():
    gm = fxpipe.compile(
        MLP(depth=2), ["cpu"] * 2, example_inputs=(torch.randn(4, 12),), tracer="export"
    ).model_graph
    found = clusters(draw_model(gm).source)
    assert re.search(r'\[label="layers\.0\.weight" fontsize=8 ', found["cluster_stage_0"])
    assert re.search(r'\[label="layers\.1\.weight" fontsize=8 ', found["cluster_stage_1"])


def test_a_model_without_stages_is_drawn_without_clusters():
    gm = torch.fx.symbolic_trace(MLP(depth=1))
    assert list(clusters(draw_model(gm).source)) == ["cluster_legend"]


def laid_out(source):
    """The boxes of a drawing as SVG: of each text, where its middle is, y from the top down."""
    found = re.findall(
        r'<text [^>]*x="([-.\d]+)" y="([-.\d]+)"[^>]*>([^<]+)</text>', render_svg(source)
    )
    return {text: (float(x), float(y)) for x, y, text in found}


def test_a_zoom_reads_from_top_to_bottom_and_micro_batches_from_left_to_right():
    pipe = long_skip()
    of_one = laid_out(pipe.draw("pipeline", microbatch=1))
    downwards = [of_one[f"stage {i}, mb 1"][1] for i in range(4)]
    assert downwards == sorted(downwards)
    of_stage = laid_out(pipe.draw("pipeline", stage=3))
    across = [of_stage[f"stage 3, mb {i}"][0] for i in range(2)]
    assert across == sorted(across)


def test_no_line_crosses_the_title_of_a_cluster_as_that_is_a_node():
    pipe = mlp()
    for source in (pipe.draw("model"), pipe.draw("pipeline", microbatch=1)):
        inner = [body for name, body in clusters(source.source).items() if name != "cluster_legend"]
        assert inner
        for body in inner:
            assert re.search(r'"title of (.*)" \[label="\1" ', body)
            assert "\tlabel=" not in body


def test_what_one_micro_batch_takes_from_the_other_is_named_beside_it():
    source = mlp().draw("pipeline", stage=1).source
    assert not [e for e in edges(source) if e[0].endswith("_mb0") and e[1].endswith("_mb1")]
    # The join of micro-batch 1 takes what the fork of micro-batch 0 gives.
    assert ("phony_s1_mb0 at join_s1_mb1", "join_s1_mb1") in edges(source)
    assert "value of the box that has this name" in clusters(source)["cluster_legend"]


def test_what_comes_from_one_place_is_one_oval():
    found = boxes(many(chunks=2).draw("pipeline", stage=1, microbatch=0).source)
    (text,) = [text for name, text in found.items() if name.startswith("from stage 0")]
    assert text == r"from stage 0, mb 0\nx\ny"


def boxes(source):
    """The label of each node."""
    return dict(re.findall(r'^\s*"?([^"\n]+?)"? \[label="(.*?)"', source, re.M))


def test_shapes_in_a_micro_batch_are_said_to_be_the_mini_batchs():
    pipe, note = mlp(), "shapes are those of the whole mini-batch"
    assert note in pipe.draw("pipeline", microbatch=1).source
    assert note not in pipe.draw("stage", stage=1).source
    assert note not in pipe.draw("model").source


def test_stages_say_their_devices_sizes_and_times():
    costs = [
        Cost(1.5e-3, 3e-3, param_bytes=2 * 2**20, activation_bytes=3072),
        Cost(2e-6, 2.0, param_bytes=12),
    ]
    found = boxes(draw_stages(mlp().stage_graph, TWO, costs).source)
    assert found["stage 0"] == (
        r"stage 0 · cuda:0\nparameters 2.0 MiB, activations 3.0 KiB"
        r"\nforward 1.5 ms, backward 3.0 ms"
    )
    assert found["stage 1"] == (
        r"stage 1 · cuda:1\nparameters 12 B, activations 0 B\nforward 2 µs, backward 2.00 s"
    )


def test_what_is_in_a_stage_is_said_in_lines_that_are_not_too_long():
    several = [f"model.encoder.layers.{i}.block.0 to 3" for i in range(3)]
    costs, contain = [Cost(), Cost()], [", ".join(several), "head"]
    found = boxes(draw_stages(mlp().stage_graph, TWO, costs, contain).source)
    first, second = (found[f"stage {stage}"].split(r"\n") for stage in range(2))
    assert first[1:4] == [f"{several[0]},", f"{several[1]},", several[2]]
    assert second[1] == "head"


def test_what_goes_between_stages_is_labelled_with_name_type_and_size():
    lines = edges(draw_stages(mlp().stage_graph, TWO, [Cost()] * 2).source)
    assert set(lines) == {("x", "stage 0"), ("stage 0", "stage 1"), ("stage 1", "output")}
    label = lines["stage 0", "stage 1"]["label"].replace(ROOM, "")
    assert label == r"  tanh\l  float32 [6, 12]\l  288 B\l"
    assert lines["stage 0", "stage 1"]["style"] == "solid"
    assert lines["x", "stage 0"]["style"] == "dotted"


def test_a_shape_that_a_later_stage_uses_is_said_to_be_numbers():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            length = x.shape[1]
            return self.b(torch.tanh(self.a(x))) + torch.arange(length)[:, None]

    pipe = fxpipe.compile(
        Positions(), ["cpu"] * 2, chunks=2, partition=["b"], example_inputs=(torch.randn(4, 5, 3),)
    )
    source = pipe.draw("stage").source.replace(ROOM, "")
    assert r"  getattr_1\l  3 numbers\l" in source, "its shape: the length is taken of it there"


def test_a_long_skip_goes_straight_to_its_stage_and_stands_out():
    lines = edges(draw_stages(long_skip().stage_graph, FOUR, [Cost()] * 4).source)
    skip = lines["stage 0", "stage 3"]
    assert (skip["color"], skip["penwidth"]) == (SKIP_COLOURS[0], "3.5")
    assert skip["label"].replace(ROOM, "").startswith(r"  a\l")
    others = [line for ends, line in lines.items() if ends != ("stage 0", "stage 3")]
    assert {(line["color"], line["penwidth"]) for line in others} == {("black", "1")}


def test_the_pipeline_is_a_grid_with_a_row_for_each_stage_and_a_box_for_each_cell():
    source = draw_pipeline(mlp().graph_module, TWO).source
    found = clusters(source)
    assert list(found) == ["cluster_stage_0", "cluster_stage_1", "cluster_legend"]
    places = []
    for stage in range(2):
        row = found[f"cluster_stage_{stage}"]
        assert f'label="stage {stage} · cuda:{stage}"' in row
        cells = re.findall(r'"mb (\d) stage (\d)" \[.*?pos="(.*?),(.*?)"', row)
        assert [(int(i), int(j)) for i, j, *_ in cells] == [(i, stage) for i in range(3)]
        places.append([(float(x), float(y)) for *_, x, y in cells])
    upper, lower = places
    assert [x for x, _ in upper] == [x for x, _ in lower] == sorted(x for x, _ in upper)
    assert len({y for _, y in upper}) == len({y for _, y in lower}) == 1
    assert upper[0][1] > lower[0][1]


def test_cells_say_that_they_are_checkpointed():
    source = draw_pipeline(mlp().graph_module, TWO).source
    assert re.search(r'"mb 0 stage 0" \[label="mb 0\\ncheckpoint\\nrecompute"', source)
    assert re.search(r'"mb 2 stage 0" \[label="mb 2"', source)


def test_copies_are_solid_dependencies_dashed_and_the_caller_dotted():
    lines = edges(draw_pipeline(mlp().graph_module, TWO).source)
    styles = {ends: line["style"] for ends, line in lines.items()}
    copies = {(f"mb {i} stage 0", f"mb {i} stage 1"): "solid" for i in range(3)}
    orders = {
        (f"mb {i} stage {j}", f"mb {i + 1} stage {j}"): "dashed" for i in range(2) for j in range(2)
    }
    into = {("x_parts", f"mb {i} stage 0"): "dotted" for i in range(3)}
    (gather,) = {head for _, head in styles if not head.startswith("mb")}
    out = {(f"mb {i} stage 1", gather): "dotted" for i in range(3)}
    assert styles == copies | orders | into | out


class Many(nn.Module):
    """Of two stages, each gives several outputs."""

    def forward(self, x, y):
        first = [torch.tanh(x + i) for i in range(4)]
        return *first, *(torch.tanh(each * y) for each in first)


def many(chunks):
    return fxpipe.compile(
        Many(), ["cpu"] * 2, chunks=chunks, example_inputs=(torch.ones(8, 3), torch.ones(8, 3))
    )


def test_inputs_and_outputs_that_have_no_room_beside_each_other_are_one_oval():
    source = draw_pipeline(many(chunks=1).graph_module, TWO).source
    found = boxes(source)
    assert found["scatter all"] == "scatter x, y"
    assert re.fullmatch(r"gather \w+, \w+, \w+ and 5 more", found["gather all"])
    lines = edges(source)
    for stage in range(2):
        assert lines[f"mb 0 stage {stage}", "gather all"]["style"] == "dotted"
    assert {tail for tail, head in lines if "stage" not in tail} == {"scatter all"}


@pytest.mark.parametrize(("count", "lines"), [(8, 8), (9, 1)])
def test_very_many_results_of_the_model_are_one_line_a_stage(count, lines):
    class Results(nn.Module):
        def forward(self, x):
            return [torch.tanh(x + i) for i in range(count)]

    found = edges(draw_model(torch.fx.symbolic_trace(Results())).source)
    results = [line for (_, head), line in found.items() if head == "output"]
    assert len(results) == lines
    assert [line.get("label") for line in results] == (
        ["  of 9 boxes"] if lines == 1 else [None] * 8
    )


def test_many_results_of_a_stage_are_one_line_of_the_stage_graph():
    pipe = many(chunks=1)
    lines = edges(draw_stages(pipe.stage_graph, TWO, [Cost()] * 2).source)
    labels = {ends: line["label"].replace(ROOM, "").strip() for ends, line in lines.items()}
    for stage in range(2):  # 4 tensors of 8 x 3 floats
        assert labels[f"stage {stage}", "output"] == r"4 values\l  float32 [8, 3]\l  384 B\l"


def test_values_that_are_copied_together_are_one_line_of_the_pipeline():
    source = many(chunks=1).draw("pipeline").source
    assert source.count('"mb 0 stage 0" -> "mb 0 stage 1"') == 1


def test_inputs_that_have_room_are_an_oval_each():
    found = boxes(draw_pipeline(many(chunks=4).graph_module, TWO).source)
    assert [text for text in found.values() if text.startswith("scatter")] == [
        "scatter x",
        "scatter y",
    ]


def test_a_portal_is_one_thick_line_a_micro_batch_past_the_stages_between():
    lines = edges(draw_pipeline(long_skip().graph_module, FOUR).source)
    skips = {ends: line for ends, line in lines.items() if line["penwidth"] != "1"}
    assert set(skips) == {(f"mb {i} stage 0", f"mb {i} stage 3") for i in range(2)}
    assert {line["color"] for line in skips.values()} == {SKIP_COLOURS[0]}
    assert [line["label"] for line in skips.values() if "label" in line] == ["a"]


def test_lines_past_a_row_go_beside_its_cells():
    source = draw_pipeline(long_skip().graph_module, FOUR).source
    cells = [
        (float(x), float(y))
        for x, y in re.findall(r'"mb \d stage [12]" \[label=.*?pos="(.*?),(.*?)"', source)
    ]
    assert len(cells) == 4
    for i in range(2):
        route = edges(source)[f"mb {i} stage 0", f"mb {i} stage 3"]["pos"].split()[1:]
        points = [tuple(map(float, point.split(","))) for point in route]
        lane = max(x for x, _ in points)
        assert all(abs(lane - x) > 36 + 5 for x, _ in cells)
        passed = [y for x, y in points if x == lane]
        assert max(passed) > max(y for _, y in cells) > min(y for _, y in cells) > min(passed)


def test_skips_of_two_values_differ_in_colour_and_in_dashes_and_keep_both_in_both_drawings():
    def cut(gm):
        stages = {"relu_2": 1, "interpolate": 2, "cat_1": 3}
        stage, labels = 0, {}
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                stage = labels[node.name] = stages.get(node.name, stage)
        return labels

    pipe = fxpipe.compile(UNet(), ["cpu"] * 4, chunks=2, partition=cut, example_inputs=images(2))
    found = {}
    for level in ("stages", "pipeline"):
        for line in edges(drawings(pipe, FOUR)[level].source).values():
            if line["penwidth"] != "1" and "label" in line:
                name = line["label"].split(r"\l")[0].strip()
                found.setdefault(name, set()).add((line["color"], line["style"]))
    assert found == {
        "relu": {(SKIP_COLOURS[0], "solid")},
        "relu_1": {(SKIP_COLOURS[1], "dashed")},
    }


def test_the_legend_explains_the_lines_that_occur_and_no_others():
    def meanings(source):
        return set(
            re.findall(r'ALIGN="LEFT">([^&]*).*?</TD>', clusters(source.source)["cluster_legend"])
        )

    plain, skipping = drawings(mlp(), TWO), drawings(long_skip(), FOUR)
    order = "fork to join: its backward comes after"
    assert meanings(plain["model"]) == {"value"}
    assert meanings(skipping["model"]) == {"value", "skip: a value that passes over stages"}
    assert meanings(plain["stages"]) == {"from and to the caller", "value for the next stage"}
    assert meanings(skipping["stages"]) == meanings(plain["stages"]) | {"long skip: a"}
    assert meanings(plain["pipeline"]) == {"from and to the caller", "copy", order}
    assert meanings(skipping["pipeline"]) == meanings(plain["pipeline"]) | {
        "skip through a portal: a"
    }


def test_the_same_model_is_drawn_by_the_same_source():
    first, second = drawings(long_skip(), FOUR), drawings(long_skip(), FOUR)
    assert {k: v.source for k, v in first.items()} == {k: v.source for k, v in second.items()}


@pytest.mark.parametrize("level", ["model", "stages", "pipeline"])
def test_every_level_is_rendered_to_svg(level):
    svg = render_svg(drawings(long_skip(), FOUR)[level])
    assert "<svg" in svg and "</svg>" in svg
    assert SKIP_COLOURS[0].lower() in svg.lower()


def test_what_is_installed_with_fxpipe_draws_where_the_path_has_no_program(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "</svg>" in render_svg(graphviz.Source("digraph {a -> b}"))


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_the_dot_of_the_system_is_preferred(monkeypatch, tmp_path):
    dot = tmp_path / "dot"
    dot.write_text("#!/bin/sh\necho '<svg>drawn by the system</svg>'")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    svg = render_svg(graphviz.Source("digraph {}"))
    assert svg.startswith("<svg><style>") and svg.endswith("drawn by the system</svg>\n")


def test_without_a_layout_program_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="install Graphviz, or `pip install graphviz-pure`"):
        render_svg(graphviz.Source("digraph {}"))
