"""The chain of passes: listed, edited, and run with passes of the user's own at every level."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import fxpipe
import passes
from fxpipe.ir.graph import STAGE
from passes.chain import Entry, Level, ToPipeline
from tests.zoo import MLP, gradients, loop, loss_of, mean_loss, same

TWO = ["cpu", "cpu"]
X = torch.ones(6, 12)


def names(chain: fxpipe.Chain) -> list[str]:
    return [entry.name for entry in chain.entries]


@dataclass(frozen=True)
class Copies:
    """Keeps the graphs that it is given, and gives others, as a pass may."""

    name: str
    seen: list[fx.GraphModule]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.seen.append(gm)
        return fx.GraphModule(gm, gm.graph)


@dataclass(frozen=True)
class Sees:
    """Keeps the graphs that it is given."""

    name: str
    seen: list[fx.GraphModule]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.seen.append(gm)
        return gm


def level_of(gm: fx.GraphModule) -> str:
    """Which kind of graph it is, by what is in it."""
    called = {getattr(node.target, "__name__", "") for node in gm.graph.nodes}
    if "backward" in called:
        return "step"
    if "gather" in called:
        return "pipeline"
    return "stage" if gm.graph.find_nodes(op="call_module", target="stage_0") else "model"


@pytest.mark.parametrize("kind", [Sees, Copies])
def test_a_pass_of_ones_own_runs_at_each_of_the_four_levels(kind):
    """It may change the graph it is given, or give another one."""
    seen: dict[str, list[fx.GraphModule]] = {level: [] for level in Level}
    own = {level: kind(f"own_{level}", seen[level]) for level in Level}
    chain = (
        fxpipe.default_chain()
        .before("split", own["model"])
        .after("split", own["stage"])
        .before("verify", own["pipeline"])
        .after("step", own["step"])
    )
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    expected, grads = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(
        model, TWO, chunks=3, loss_fn=mean_loss, passes=chain, example_inputs=(x,)
    ) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert same(output.detach(), expected) and same(gradients(model), grads)
        pipe.step(x, target=target)
    for level, graphs in seen.items():
        assert [level_of(gm) for gm in graphs] == [level]


def test_a_pass_may_be_a_function_and_may_be_left_out():
    seen = []

    def looks(gm):
        """Looks at the graph."""
        seen.append(gm)
        return gm

    chain = fxpipe.default_chain().after("dependencies", looks).without("verify")
    assert names(chain)[-5:] == ["looks", "compiled", "step", "verify_step", "compiled_step"]
    assert "looks             pipeline          Looks at the graph." in str(chain)
    with fxpipe.compile(MLP(), TWO, example_inputs=(X,), passes=chain) as pipe:
        assert seen == [pipe.graph_module]


def test_a_pass_may_be_made_from_what_is_known_of_the_compilation():
    made: list[ToPipeline] = []

    def make(context: ToPipeline) -> passes.Pass:
        made.append(context)
        return Sees("own", [])

    own = Entry("own", make, Level.PIPELINE, Level.PIPELINE, Sees, needs=("streams",))
    chain = fxpipe.default_chain().before("verify", own)
    with fxpipe.compile(MLP(), TWO, chunks=3, example_inputs=(X,), passes=chain):
        pass
    (context,) = made
    assert context.devices == ("cpu", "cpu") and context.chunks == 3
    with pytest.raises(ValueError, match="'own' needs 'streams' before it"):
        chain.without("streams")


def test_a_pass_may_take_the_place_of_another():
    class Halves:
        """Cuts in the middle."""

        name = "halves"

        def __call__(self, gm):
            work = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
            for i, node in enumerate(work):
                node.meta[STAGE] = int(2 * i >= len(work))
            return gm

    chain = fxpipe.default_chain().replace("partition", Halves())
    assert names(chain) == names(fxpipe.default_chain())
    assert "partition         model             Cuts in the middle." in str(chain)
    with fxpipe.compile(MLP(depth=4), TWO, example_inputs=(X,), passes=chain) as pipe:
        sizes = [len(stage.module.graph.find_nodes(op="call_module")) for stage in pipe.stages]
        assert sizes == [2, 2]


def refusal(edit) -> str:
    with pytest.raises(ValueError) as error:
        edit(fxpipe.default_chain())
    return str(error.value)


def test_a_name_that_no_pass_has_is_refused_with_those_that_are_near():
    said = refusal(lambda chain: chain.before("partitions", Sees("own", [])))
    assert said == "no pass of the chain is called 'partitions': did you mean 'partition'?"
    said = refusal(lambda chain: chain.without("xyz"))
    assert said.startswith("no pass of the chain is called 'xyz': there are ['batch_norm', 'alias'")


def test_what_others_need_cannot_be_left_out():
    assert refusal(lambda chain: chain.without("alias")) == (
        "the pass 'inputs' needs 'alias' before it: keep 'alias', put another pass in its place by "
        "replace('alias', ...), or leave 'inputs' out first"
    )
    assert refusal(lambda chain: chain.without("step")) == (
        "no pass leads to the step graph: keep 'step', or put another pass in its place by "
        "replace('step', ...)"
    )


def test_what_is_no_pass_is_refused():
    with pytest.raises(TypeError, match="'verify' is no pass: give an object with a name"):
        fxpipe.default_chain().before("verify", "verify")
    with pytest.raises(TypeError, match=r"Verify'> is no pass"):
        fxpipe.default_chain().before("verify", passes.Verify)
    with pytest.raises(TypeError, match=r"passes is a list: give a chain, such as"):
        fxpipe.compile(MLP(), TWO, passes=[passes.Verify()])


def test_two_passes_of_one_name_may_be_there_but_not_be_referred_to():
    chain = fxpipe.default_chain().before("split", Sees("own", [])).after("split", Sees("own", []))
    with pytest.raises(ValueError, match="2 passes of the chain are called 'own': give them"):
        chain.without("own")


def test_a_chain_survives_pickling():
    chain = fxpipe.default_chain().before("split", Sees("own", [])).without("verify")
    again = pickle.loads(pickle.dumps(chain))
    assert str(again) == str(chain)
    with fxpipe.compile(MLP(), TWO, chunks=2, passes=chain) as pipe:
        pickled = pickle.dumps(pipe)
    with pickle.loads(pickled) as other:
        assert other(X).shape == X.shape


OPTIONAL = [
    entry.name
    for entry in fxpipe.default_chain().entries
    if entry.source == entry.target
    and not any(entry.name in other.needs for other in fxpipe.default_chain().entries)
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_nobody_needs_may_be_left_out_and_the_graph_runs_or_is_refused(name):
    """Stages on the CPU, run one after the other, need no copies and no order to be right."""
    model, x = MLP(), torch.randn(6, 12)
    expected, _ = loop(model, (x,), 2)
    chain = fxpipe.default_chain().without(*{name, "verify"})
    with fxpipe.compile(
        model, TWO, chunks=2, partition=["layers.2"], passes=chain, example_inputs=(x,)
    ) as pipe:
        assert same(pipe.graph_module(x), expected)


def test_the_chain_is_printed_with_levels_and_summaries():
    lines = str(fxpipe.default_chain()).splitlines()
    assert_expected_inline(
        "".join(f"{line}\n" for line in lines if "→" in line[:30]),
        """\
split             model → stage     The nodes of each stage are moved into a module of its own, and
microbatch        stage → pipeline  The pass unrolls the stage graph, which then calls every stage
step              stage → step      The pass writes a whole training step, with its forwards, losses
""",
    )


def test_the_documentation_has_the_passes_in_the_order_of_the_chain():
    text = (Path(__file__).parents[2] / "docs" / "passes.rst").read_text()
    titles = re.findall(r"^(\w+)\n~+$", text, re.M)
    listed = [title for title in titles if title in names(fxpipe.default_chain())]
    assert listed == names(fxpipe.default_chain())
