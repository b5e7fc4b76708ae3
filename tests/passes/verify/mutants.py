"""Mutation test of the verifier: each node of real graphs is taken out, exchanged, moved or given
something else, one at a time, and the verifier has to refuse each mutant, or show that it computes
the same.

::

    python -m tests.passes.verify.mutants            all graphs: a table, and those that survive
    python -m tests.passes.verify.mutants --quick    one schedule, one checkpoint mode
    python -m tests.passes.verify.mutants --each 50  of each graph each 50th mutant
    python -m tests.passes.verify.mutants --ranks    the transfers of ranks
    python -m tests.passes.verify.mutants --real     GPT-2, T5 and a ResNet, as they are compiled

A mutant that is accepted computes the same if each lane computes the same nodes on the same values
in the same order (:func:`passes.verify.verify.meaning`): then only waits and copies have moved, and
the verifier has shown that each of them still comes ahead of the uses of its values.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any

import click
from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import LANE, MICROBATCH, STAGE, STREAM
from fxpipe.ir.printing import format_node
from passes import VerifyError
from passes.verify.transfers import TransferError, meaning_of_ranks, verify
from passes.verify.values import lane_of
from passes.verify.verify import Verify, meaning
from tests.passes.verify import graphs as small
from tests.passes.verify import real as models_of_transformers
from tests.passes.verify.graphs import MODELS, rank_graphs

GATES = (ops.copy, ops.send, ops.wait, ops.join, ops.recompute)
ACTIONS = (
    *(ops.replay, ops.accumulate, ops.optimize, ops.weight_grad, ops.update_statistics),
    *(ops.write_back, ops.reduce, ops.reduced),
)
CARRIED = (
    *(ops.portal_blue, ops.portal_copy, ops.portal_orange),
    *(ops.lend, ops.bring, ops.replicate),
)
MUTATED = (
    *(*GATES, *ACTIONS, *CARRIED, ops.fork, ops.checkpoint, ops.gathered, ops.gather),
    *(ops.offloaded, ops.offload, ops.reload, ops.selective),
    *(ops.forward, ops.loss, ops.loss_backward, ops.backward, ops.backward_input, ops.average),
)
TRANSFERS = (ops.transmit, ops.receive, ops.arrived)
Change = Callable[[fx.Node], bool]
"""Changes a graph at a node. Returns False if there is nothing to change there."""


class Mutant:
    """A copy of a graph, with the modules and tensors of the graph module that it is a copy of."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.graph, copies = gm, fx.Graph(), {}
        self.graph.output(self.graph.graph_copy(gm.graph, copies))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gm, name)


def take_out(node: fx.Node) -> bool:
    """The node's first argument takes its place, or nothing, if nobody uses the node's value."""
    if node.users and node.target not in (*GATES, *CARRIED, ops.fork):
        return False
    value = node.args[0]
    for user in list(node.users):
        if node.target is ops.fork and user.args[1] == 1:
            for join in list(user.users):
                join.args = (join.args[0], None)
            continue
        if isinstance(value, fx.Node):
            user.replace_input_with(node, value)
        elif user.target is operator.getitem and node.target is not ops.fork:
            user.replace_all_uses_with(value[user.args[1]])
        else:
            _put(user, node, value)
    for user in [*node.users, node]:
        if not user.users:
            user.graph.erase_node(user)
    return True


def _put(user: fx.Node, node: fx.Node, value: Any) -> None:
    """Give a user a tuple of values in place of a node; a getitem gives its elements further on."""
    if user.target is operator.getitem:
        for each in list(user.users):
            if each.target is operator.getitem:
                each.replace_all_uses_with(value[each.args[1]])
            else:
                _put(each, user, value)
        return

    def given(arg: Any) -> Any:
        if arg is node:
            return value
        return tuple(map(given, arg)) if isinstance(arg, tuple) else arg

    user.args = tuple(map(given, user.args))


def exchange(node: fx.Node) -> bool:
    """The node and the next one of its kind exchange what they are given first."""
    other = following(node)
    if other is None or node.args[0] == other.args[0]:
        return False
    node.args, other.args = (other.args[0], *node.args[1:]), (node.args[0], *other.args[1:])
    return True


def following(node: fx.Node, distance: int = 1) -> fx.Node | None:
    """The next node of a kind, in the graph's order."""
    alike = [n for n in node.graph.nodes if (n.op, n.target) == (node.op, node.target)]
    at = alike.index(node) + distance
    return alike[at] if at < len(alike) else None


def earlier(node: fx.Node) -> bool:
    """The node moves ahead of the node before it in its lane."""
    before = node.prev
    while before.op != "root" and lane_of(before) != lane_of(node):
        before = before.prev
    if before.op == "root" or before.op == "placeholder":
        return False
    between, at = [], before
    while at is not node:
        between.append(at)
        at = at.next
    if any(each in between for each in node.all_input_nodes):
        return False
    before.prepend(node)
    return True


def other_argument(index: int, distance: int) -> Change:
    """The node gets one of the arguments of another node of its kind."""

    def change(node: fx.Node) -> bool:
        other = following(node, distance)
        if other is None or min(len(node.args), len(other.args)) <= index:
            return False
        if node.args[index] == other.args[index]:
            return False
        args = list(node.args)
        args[index] = other.args[index]
        node.args = tuple(args)
        return True

    return change


def other_stream(index: int) -> Change:
    """A stream that the node names becomes the other one of its device."""

    def change(node: fx.Node) -> bool:
        if len(node.args) <= index or not isinstance(node.args[index], str):
            return False
        device, _, role = node.args[index].partition("/")
        args = list(node.args)
        args[index] = f"{device}/{'copy' if role == 'compute' else 'compute'}"
        node.args = tuple(args)
        return node.target is not ops.bring and node.target is not ops.replicate

    return change


def other_meta(key: str) -> Change:
    """What the node notes about where it belongs becomes something else."""

    def change(node: fx.Node) -> bool:
        if key not in node.meta:
            return False
        value = node.meta[key]
        if key == STREAM:
            device, _, role = value.partition("/")
            node.meta[key] = f"{device}/{'copy' if role == 'compute' else 'compute'}"
        else:
            node.meta[key] = value + 1 if value == 0 else value - 1
        return True

    return change


CHANGES: dict[str, Change] = {
    "taken out": take_out,
    "exchanged": exchange,
    "moved": earlier,
    **{f"argument {i} of the next": other_argument(i, 1) for i in range(5)},
    **{f"argument {i} of the one after": other_argument(i, 3) for i in (1, 2)},
    "stream 1": other_stream(1),
    "stream 2": other_stream(2),
    **{f"noted {key}": other_meta(key) for key in (STREAM, STAGE, MICROBATCH, LANE)},
}


def mutants(
    gm: fx.GraphModule, functions: Sequence[Any] = MUTATED, each: int = 1
) -> Iterator[tuple[str, str, Mutant]]:
    """All mutants of a graph at nodes that run stages or call one of these functions, or the first
    of so many each: the change, the node in words, the mutant."""
    names = [n.name for n in gm.graph.nodes if n.target in functions or n.op == "call_module"]
    for name, (what, change) in islice(product(names, CHANGES.items()), 0, None, each):
        mutant = Mutant(gm)
        node = next(n for n in mutant.graph.nodes if n.name == name)
        said = format_node(node)
        if change(node):
            yield what, said, mutant


def verdict(gm: fx.GraphModule, mutant: Mutant) -> str:
    """What becomes of a mutant: "no graph", "refused", "the same", or "missed"."""
    try:
        mutant.graph.lint()
    except RuntimeError:
        return "no graph"  # a node uses a value that comes later
    try:
        Verify()(mutant)
    except VerifyError:
        return "refused"
    return "the same" if meaning(mutant) == meaning(gm) else "missed"


def verdict_of_ranks(parts: Sequence[fx.GraphModule], rank: int, mutant: Mutant) -> str:
    """What becomes of a mutant of one rank's graph among the graphs of all: see :func:`verdict`."""
    try:
        mutant.graph.lint()
    except RuntimeError:
        return "no graph"
    changed: list[Any] = [*parts[:rank], mutant, *parts[rank + 1 :]]
    try:
        verify(changed)
    except (VerifyError, TransferError):
        return "refused"
    return "the same" if meaning_of_ranks(changed) == meaning_of_ranks(parts) else "missed"


def judged(
    quick: bool, each: int, source: Any = small
) -> Iterator[tuple[str, Iterator[tuple[str, str, str]]]]:
    """By the name of a graph: of its mutants the change, the node and the verdict. ``source``: the
    file that makes the graphs."""
    for name, gm in graphs(quick, source):
        yield name, _judged(gm, each)


def _judged(gm: fx.GraphModule, each: int) -> Iterator[tuple[str, str, str]]:
    for what, node, mutant in mutants(gm, MUTATED, each):
        yield what, node, verdict(gm, mutant)


def judged_of_ranks(quick: bool, each: int) -> Iterator[tuple[str, Iterator[tuple[str, str, str]]]]:
    """As :func:`judged`, for the transfers of the graphs of ranks."""

    def verdicts(parts: list[fx.GraphModule]) -> Iterator[tuple[str, str, str]]:
        for rank, gm in enumerate(parts):
            for what, node, mutant in mutants(gm, TRANSFERS, each):
                yield what, f"rank {rank}, {node}", verdict_of_ranks(parts, rank, mutant)

    modes = ["except_last"] if quick else ["never", "except_last", "always"]
    schedules = {"1f1b": 4} if quick else {"1f1b": 4, "interleaved_1f1b": 2, "zb_h1": 4, "zbv": 2}
    for model in MODELS:
        if model == "writing":
            continue  # which is refused on ranks
        for schedule, ranks in schedules.items():
            for mode in modes:
                parts = rank_graphs(model, schedule, mode, 4, ranks)
                yield f"{ranks} ranks, {model}, {schedule}, {mode}", verdicts(parts)


def graphs(quick: bool, source: Any = small) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that are changed, with their names."""
    schedules = ["1f1b"] if quick else ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]
    schedules += ["zb_h1"] if quick else ["zb_h1", "zbv", "dualpipe_v"]
    modes = [("never", 1), ("except_last", 1), ("always", 2), ("selective", 1), ("offload", 1)]
    for model in source.MODELS:
        for mode, segments in modes:
            yield f"{model}, {mode} {segments}", source.pipeline_graph(model, mode, segments)
        for i, schedule in enumerate(schedules):
            lanes = 4 if schedule in ("gpipe", "1f1b", "zb_h1") else 2
            chunks = 4 if schedule == "dualpipe_v" else 3 if lanes == 4 else 4
            for mode, segments in modes[i % len(modes) :][:1] if quick else modes:
                name = f"{model}, {schedule}, {mode} {segments}"
                yield name, source.step_graph(model, schedule, mode, segments, chunks, lanes)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer schedules and checkpoint modes.")
@click.option("--each", default=1, help="Of each graph the first mutant of so many.")
@click.option("--ranks", is_flag=True, help="The transfers of ranks' graphs.")
@click.option("--real", is_flag=True, help="The graphs of GPT-2, T5 and a ResNet.")
@click.option("--only", default="", help="Graphs in whose names this text is.")
@click.option("--show", default=10, help="How many mutants that are missed are shown for a graph.")
def main(quick: bool, each: int, ranks: bool, real: bool, only: str, show: int) -> None:
    """Change each node of real graphs, and print what the verifier says."""
    every: Counter[str] = Counter()
    source = models_of_transformers if real else small
    chosen = judged_of_ranks(quick, each) if ranks else judged(quick, each, source)
    for name, verdicts in chosen:
        if only not in name:
            continue
        found: Counter[str] = Counter()
        missed = []
        for what, node, said in verdicts:
            found[said] += 1
            if said == "missed":
                missed.append(f"    {what}: {node}")
        every += found
        print(f"{name}: {dict(found)}", flush=True)
        print("\n".join(missed[:show]), end="\n" if missed else "")
    count = every["refused"] + every["the same"] + every["missed"]
    caught = every["refused"] + every["the same"]
    print(
        f"{count} mutants: {every['refused']} refused, {every['the same']} compute the same, "
        f"{every['missed']} missed: {caught / count:.2%} found; {every['no graph']} more are no "
        "graphs"
    )
    sys.exit(every["missed"] > 0)


if __name__ == "__main__":
    main()
