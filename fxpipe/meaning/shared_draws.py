"""Random numbers that the model draws once, and every micro-batch anew.

::

    images ─ linear ─ dropout ─ linear ─┐        all micro-batches share images: each of them draws
                                        @ ─      a mask for all images
    texts ── linear ─ dropout ─ linear ─┘        micro-batches cut texts: each draws the masks of
                                                 its own rows

Random numbers for rows that are cut are those of each row, whatever its micro-batch. Those for an
input that is shared are drawn by each micro-batch for the whole input, as by a loop that calls the
model for each of them. Where that input is as large as the batch, its rows may be a batch, too, and
the user expects one mask for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from fxpipe.ir.graph import RANDOM, WRITES
from fxpipe.runtime.microbatch import InDim


def draws_for_shared(
    graph: fx.Graph, dims: Sequence[InDim], shared: Collection[int]
) -> dict[int, fx.Node]:
    """The nodes that draw random numbers for what is computed from inputs that all micro-batches
    share, and from no input that is cut.

    Args:
        graph: a model graph after pass "alias". Its first placeholders are the inputs.
        dims: the batch dimension of each input.
        shared: the places of those inputs, without a batch dimension, that are asked for.

    Returns:
        By the place of an input, the first such node that depends on it.
    """
    found: dict[int, fx.Node] = {}
    for node, behind in inputs_behind(graph, len(dims)):
        if RANDOM in node.meta and all(dims[place] is None for place in behind):
            for place in behind.intersection(shared):
                found.setdefault(place, node)
    return found


def inputs_behind(graph: fx.Graph, count: int) -> Iterator[tuple[fx.Node, set[int]]]:
    """Each node of a model graph after pass "alias", with the places of the inputs that it depends
    on, by what it takes and by what has been written to that.

    ``count`` is the number of inputs, which are the first placeholders; a seed may come after them.
    """
    inputs = graph.find_nodes(op="placeholder")[:count]
    sources = {node.name: {place} for place, node in enumerate(inputs)}
    for node in graph.nodes:
        own = sources.setdefault(node.name, set())
        own.update(*(sources[each.name] for each in node.all_input_nodes))
        for written in node.meta.get(WRITES, ()):
            if written in sources:  # else a later pass has put another node in its place
                sources[written] |= own
        yield node, own
