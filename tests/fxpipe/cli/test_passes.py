import re

import pytest
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
    assert about["microbatch"].startswith("The pass unrolls the stage graph, ")
    assert max(map(len, result.output.splitlines())) <= 100


DEVICES = {"plan": "p40,p40", "compile": "cpu,cpu"}
CHAIN = """
import fxpipe

class Notes:
    '''Write the number of nodes to a file.'''
    name = "notes"
    def __call__(self, gm):
        with open("notes.txt", "a") as file:
            file.write(f"{len(gm.graph.nodes)}\\n")
        return gm

chain = fxpipe.default_chain().before("split", Notes())
def made():
    return chain
"""


@pytest.mark.parametrize("name", ["chain", "made"])
def test_a_chain_of_ones_own_is_listed_planned_and_compiled(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = f"own_{name}"
    (tmp_path / f"{module}.py").write_text(CHAIN)
    listed = run("passes", f"{module}:{name}").output
    assert re.search(r"^notes +model +Write the number of nodes to a file.$", listed, re.M)
    for command in ("plan", "compile"):
        inputs = ("--input", "4,3,16,16", "--devices", DEVICES[command])
        done = run(command, "fxpipe.demo:UNet", *inputs, "--passes", f"{module}:{name}")
        assert done.exit_code == 0
    assert len((tmp_path / "notes.txt").read_text().splitlines()) == 2


def test_a_chain_that_is_none_is_refused():
    assert "is a file: give its module" in refused("passes", "mine.py:chain")
    assert "it has to give a chain" in refused("passes", "torch:pi")
