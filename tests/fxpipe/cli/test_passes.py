import re

import torch

import fxpipe
from fxpipe.cli.passes import chains
from tests.fxpipe.cli.invoke import refused, run
from tests.zoo import MLP


def test_the_passes_are_those_that_run_in_that_order(tmp_path):
    x = torch.ones(6, 12)
    with fxpipe.compile(
        MLP(),
        ["cpu", "cpu"],
        example_inputs=(x,),
        loss_fn=lambda output, target: output.sum(),
        deferred_batch_norm=True,
        dump=tmp_path,
    ) as pipe:
        pipe.step(x)
    ran = [
        [file.stem[3:] for file in sorted(folder.glob("*.txt"))][1:]
        for folder in sorted(tmp_path.iterdir())
        if folder.is_dir()
    ]
    stages, step, pipeline = ran if len(ran[1]) == 1 else (ran[0], ran[2], ran[1])
    assert [[kind.name for kind in kinds] for kinds in chains().values()] == [
        stages,
        pipeline,
        step,
    ]


def test_each_pass_has_a_line_that_says_what_it_does():
    result = run("passes")
    assert result.exit_code == 0
    lines = dict(re.findall(r"^  (\w+) {2,}(\w.{15,})$", result.output, re.M))
    assert list(lines) == [kind.name for kinds in chains().values() for kind in kinds]
    assert lines["partition"] == "give every node of the model graph its stage."


def test_passes_takes_no_arguments():
    assert "unexpected extra argument" in refused("passes", "alias")
