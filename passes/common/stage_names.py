"""Names for stages, by the modules that are in them: for reports, plans, drawings and errors.

::

    stage 0    embed, layers.0 to 7, layers.8 up to attn       modules that are whole, and a part of
    stage 1    layers.8 from mlp on, layers.9 to 15            one that the cut divides
    stage 2    layers.16 to 23, head, cross_entropy

A part of a module that is divided at one place is named by where it ends or begins. What takes a
small part of a stage's time and holds a small part of its parameters is not named, as long as
something else is: an embedding takes no time, but is often what a device has to hold. Of modules it
is said how many such ones there are, and a single one is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from fxpipe.ir.cost import cost_of
from fxpipe.ir.graph import STAGE, stage_nodes
from fxpipe.ir.printing import operator_name
from passes.common.names import calls_of

MOST = 4  # items in a name
SMALL = 0.02  # of a stage's time: items that take less are left out
SMALL_OPERATOR = 0.1  # the same for an operator that is in no module but the model
LARGE = 0.1  # of the bytes of a stage's parameters: items that hold more are named in any case


@dataclass(eq=False)
class _Contained:
    """A call of a module, or a node that belongs to a module itself; ``parts`` has what is in it,
    in the order of the program. ``path`` is empty for the model itself, and for a node the name of
    its operator; ``outer`` is then the path of the module."""

    path: str
    outer: str = ""
    nodes: list[fx.Node] = field(default_factory=list)
    parts: dict[str | fx.Node, _Contained] = field(default_factory=dict)
    is_operator: bool = False

    @property
    def text(self) -> str:
        """What it is called in the name of a stage."""
        return f"{self.path} of {self.outer}" if self.outer else self.path

    def within(self, outer: _Contained) -> str:
        """Its path within a call that contains it."""
        return self.path.removeprefix(f"{outer.path}.")


@dataclass(frozen=True)
class _NamedPart:
    """A part of a stage's name: what it is called, the nodes that it stands for, and the call that
    it is, if that is wholly in the stage."""

    text: str
    nodes: Sequence[fx.Node]
    call: _Contained | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it is a node that belongs to no module but the model."""
        call = self.call
        return call is not None and call.is_operator and not any(calls_of(self.nodes[0]))


def stage_names(graph: fx.Graph) -> list[str]:
    """The name of each stage of a model graph whose nodes have stages."""
    work = list(stage_nodes(graph))
    root = _tree(work)
    stages = sorted({node.meta[STAGE] for node in work})
    return [_name(list(_items(root, stage))) for stage in stages]


def _tree(work: Iterable[fx.Node]) -> _Contained:
    root = _Contained("")
    for node in work:
        call = root
        call.nodes.append(node)
        for key, path in calls_of(node):
            # fx numbers the calls of a module, but for the first. Where a trace of one layer stands
            # for all that are alike, keys end with "@" and the path.
            number = key.rpartition("@")[2]
            label = f"{path}@{number}" if number.isdigit() and number != path else path
            call = call.parts.setdefault(key, _Contained(label))
            call.nodes.append(node)
        if call.path == "" or node.op != "call_module":
            call.parts[node] = _Contained(_operator(node), call.path, [node], is_operator=True)
    return root


def _operator(node: fx.Node) -> str:
    """The name of an operator, without what does not help to find it in the model."""
    name = str(node.target) if node.op == "call_module" else operator_name(node)
    return name.removeprefix("aten.").partition(".")[0] if name.startswith("aten.") else name


def _items(call: _Contained, stage: int) -> Iterator[_NamedPart]:
    """Name the parts of a module's call that are in a stage: the call itself, if all of it is."""
    inside = [node for node in call.nodes if node.meta[STAGE] == stage]
    if not inside:
        return
    if len(inside) == len(call.nodes) and call.path:
        yield _NamedPart(call.text, inside, call)
        return
    found = _runs([item for part in call.parts.values() for item in _items(part, stage)])
    is_row = any(item.call is None and " to " in item.text for item in found)
    divided = None if is_row or not call.path else _divided(call, stage)
    if divided is None:
        yield from found
    else:
        yield _NamedPart(divided, inside)


def _divided(call: _Contained, stage: int) -> str | None:
    """The words for a part of a call that is divided at one place; None if it is divided at
    several."""
    parts = list(call.parts.values())
    holds = [[node.meta[STAGE] == stage for node in part.nodes] for part in parts]
    if not all(all(each) or not any(each) for each in holds):
        return None  # a module within this one is divided: its part has a name of its own
    here = [all(each) for each in holds]
    changes = [i for i, (a, b) in enumerate(pairwise(here), 1) if a != b]
    if len(changes) != 1:
        return None
    (at,) = changes
    first, last, is_begin = parts[:at], parts[at:], here[0]
    own = first if is_begin else last
    if len(own) == 1 and not own[0].is_operator:
        return own[0].path
    if len(last) == 1 and last[0].is_operator:
        operator = last[0].path
        if is_begin:
            return f"{call.path} without its last {operator}"
        return f"the last {operator} of {call.path}"
    if is_begin:
        return f"{call.path} up to {first[-1].within(call)}"
    return f"{call.path} from {last[0].within(call)} on"


def _runs(items: list[_NamedPart]) -> list[_NamedPart]:
    """The items, in which neighbours whose last names are consecutive numbers are one."""
    found: list[list[_NamedPart]] = []
    for item in items:
        if found and _follows(found[-1][-1], item):
            found[-1].append(item)
        else:
            found.append([item])
    return [_joined(run) for run in found]


def _follows(one: _NamedPart, other: _NamedPart) -> bool:
    if one.call is None or other.call is None:
        return False
    (a, _, i), (b, _, j) = (item.text.rpartition(".") for item in (one, other))
    return a == b and i.isdigit() and j.isdigit() and int(j) == int(i) + 1


def _joined(run: Sequence[_NamedPart]) -> _NamedPart:
    if len(run) == 1:
        return run[0]
    last = run[-1].text.rpartition(".")[2]
    return _NamedPart(f"{run[0].text} to {last}", [node for item in run for node in item.nodes])


def _name(items: Sequence[_NamedPart]) -> str:
    costs = [cost_of(item.nodes) for item in items]
    seconds, held = sum(c.seconds for c in costs), sum(c.param_bytes for c in costs)
    kept = [
        item
        for item, cost in zip(items, costs, strict=True)
        if cost.seconds > seconds * (SMALL_OPERATOR if item.is_operator else SMALL)
        or cost.param_bytes > held * LARGE
    ]
    named = dict.fromkeys(item.text for item in kept or items)
    smaller = {item.text for item in items if not _is_operator(item)} - named.keys()
    if len(smaller) == 1:  # "1 more" would be no shorter than the name
        named = dict.fromkeys(item.text for item in items if item.text in named.keys() | smaller)
    texts = list(named)
    more = len(texts) - MOST
    if more > 1:
        texts = [*texts[: MOST - 1], f"{more} more", texts[-1]]
    return ", ".join(texts) + f" and {len(smaller)} smaller ones" * (len(smaller) > 1)


def _is_operator(item: _NamedPart) -> bool:
    return item.call is not None and item.call.is_operator
