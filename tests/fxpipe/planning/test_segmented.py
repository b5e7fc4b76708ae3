import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.planning import segmented
from fxpipe.planning.segmented import KnownSegments, SegmentedStage


def layers(count, width=32):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def stages(count, devices):
    x = torch.randn(16, 32)
    options = {"chunks": 4, "costs": "analytic", "example_inputs": (x,)}
    with fxpipe.compile(layers(count), ["cpu"] * devices, **options) as pipe:
        return [stage.module for stage in pipe.stages]


def test_segments_take_equal_parts_of_equal_layers():
    (stage,) = stages(4, 1)
    assert SegmentedStage.of(stage, 2).shares == pytest.approx([0.5, 0.5])
    assert len(SegmentedStage.of(stage, 8).calls) == 4, "it has no more places to cut"


def test_stages_with_the_same_nodes_are_cut_once_and_others_by_themselves():
    known = KnownSegments()
    (stage,), (again,), (longer,) = stages(4, 1), stages(4, 1), stages(6, 1)
    assert known.of(stage, 2) is known.of(again, 2)
    assert known.of(stage, 2) is not known.of(stage, 4)
    assert known.of(stage, 2) is not known.of(longer, 2)


def test_a_search_under_a_limit_cuts_each_stage_into_segments_once(monkeypatch):
    cut = []
    original = segmented.segmented

    def counted(stage, count):
        cut.append((stage.code, count))
        return original(stage, count)

    monkeypatch.setattr(segmented, "segmented", counted)
    x = torch.randn(4096, 32)
    free = fxpipe.plan(layers(12), ["a100"] * 2, example_inputs=(x,), chunks=8, schedule="1f1b")
    limit = 0.7 * max(free.memory)
    specs = [fxpipe.DeviceSpec.of("a100").with_memory(limit)] * 2
    plan = fxpipe.plan(
        layers(12), specs, example_inputs=(x,), chunks=8, schedule="1f1b", checkpoint="auto"
    )
    assert plan.fits and cut
    assert len(cut) == len(set(cut))
