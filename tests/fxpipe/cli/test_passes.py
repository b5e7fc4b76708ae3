import re

import torch

import fxpipe
from passes.chain import Level
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
        stage_backend="eager",
        dump=tmp_path,
    ) as pipe:
        pipe.step(x)
    ran = {
        re.search("stages|pipeline|step", folder.name).group(): [
            file.stem[3:] for file in sorted(folder.glob("*.txt"))
        ][1:]
        for folder in sorted(tmp_path.iterdir())
        if folder.is_dir()
    }
    listed = {
        name: [entry.name for entry in fxpipe.default_chain().entries if entry.leads_to == level]
        for name, level in zip(("stages", "pipeline", "step"), list(Level)[1:], strict=True)
    }
    listed["stages"].remove("all_microbatches")  # this model takes any batch size
    assert ran == listed


def test_each_pass_has_a_line_that_says_what_it_does():
    result = run("passes")
    assert result.exit_code == 0
    lines = re.findall(r"^(\w+) {2,}(\w+(?: → \w+)?) {2,}(\w.{15,})$", result.output, re.M)
    assert [(name, levels) for name, levels, _ in lines] == [
        (entry.name, entry.levels) for entry in fxpipe.default_chain().entries
    ]
    about = {name: said for name, _, said in lines}
    assert about["partition"] == "Give every node of the model graph its stage."
    assert max(map(len, result.output.splitlines())) <= 100


def test_passes_takes_no_arguments():
    assert "unexpected extra argument" in refused("passes", "alias")
