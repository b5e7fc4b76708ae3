"""What the verifier says of a changed graph is what the simulated accelerator says of its run.

A pass behind the verifier changes one node of the pipeline graph, as the mutation test of the
verifier does (:mod:`tests.passes.verify.mutants`). A graph that the verifier would have accepted
runs without a race and has the bits of the loop. A graph that races has to be one that the
verifier refuses.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

import fxpipe
from fxpipe import ops
from tests.accelerator import sim
from tests.accelerator.pipelines import FOUR, own_streams
from tests.passes.verify.mutants import Mutant, mutants, take_out, verdict
from tests.zoo import Chain, gradients, loop, loss_of, same

CHUNKS, STAGES = 2, 3


@dataclass(frozen=True)
class Exchanged:
    """A pass that puts a mutant in the place of a graph: the one of this number, or the one that
    lacks the node of this name."""

    which: int | str
    name: str = "exchanged"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        changed = fx.GraphModule(gm, self.mutant(gm).graph)
        changed.meta.update(gm.meta)
        return changed

    def mutant(self, gm: fx.GraphModule) -> Mutant:
        """Give the mutant of a graph."""
        if isinstance(self.which, int):
            return next(islice(mutants(gm), self.which, None))[2]
        mutant = Mutant(gm)
        take_out(next(node for node in mutant.graph.nodes if node.name == self.which))
        return mutant


def skipping() -> Chain:
    """Three stages, with a skip over one of them."""
    torch.manual_seed(0)
    return Chain(STAGES, {0: (2,)})


def compiled(model: Any, chain: fxpipe.Chain | None = None) -> fxpipe.Pipeline:
    devices = FOUR[:STAGES]
    return fxpipe.compile(
        model, devices, chunks=CHUNKS, partition=["b", "c"], checkpoint="always", passes=chain
    )


def graph() -> fx.GraphModule:
    """The pipeline graph that is changed."""
    with own_streams(), compiled(skipping()) as pipe:
        pipe(rows().to("sim:0")).sum().backward()
        return pipe.graph_module


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 18).reshape(6, 3)


def is_right(which: int | str) -> bool:
    """Whether a mutant runs without an error and a race, and with the bits of the loop."""
    model = skipping()
    wanted, grads = loop(copy.deepcopy(model), (rows(),), CHUNKS)
    chain = fxpipe.default_chain().after("verify", Exchanged(which))
    try:
        with own_streams(), compiled(model, chain) as pipe:
            output = pipe(rows().to("sim:0"))
            loss_of(output).backward()
            found = [output.detach().cpu(), *(grad.cpu() for grad in gradients(model))]
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return False
    finally:
        races = sim.races()
        sim.clear()
    return not races and same(found, [wanted, *grads])


def test_graphs_that_the_verifier_accepts_run_without_races():
    gm = graph()
    every = [verdict(gm, mutant) for *_, mutant in mutants(gm)]
    accepted = [i for i, said in enumerate(every) if said == "the same"]
    assert len(accepted) > 5
    some = accepted[:: max(1, len(accepted) // 12)]
    assert [i for i in some if not is_right(i)] == []


def test_graphs_without_a_wait_race_and_are_refused():
    gm = graph()
    waits = [node.name for node in gm.graph.nodes if node.target is ops.wait]
    wrong = [name for name in waits if not is_right(name)]
    assert wrong  # and not all: the inputs, for one, are on the first device already
    assert {verdict(gm, Exchanged(name).mutant(gm)) for name in wrong} == {"refused"}
