"""The chain: the passes of a compilation, as a list that users print and edit.

::

    print(fxpipe.default_chain())
    chain = fxpipe.default_chain().before("split", Mine()).after("step", Other()).without("verify")
    fxpipe.compile(model, devices, passes=chain)

The default order is in :mod:`passes.order`. An entry of the list is a :class:`passes.entry.Entry`.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpipe.ir.text import summary
from passes.entry import Context, Entry, Level, Pass, ToPipeline, ToStages, ToStep
from passes.order import ENTRIES

__all__ = [
    "Chain",
    "Context",
    "Entry",
    "Level",
    "Pass",
    "ToPipeline",
    "ToStages",
    "ToStep",
    "chain_of",
    "default_chain",
    "run",
]

WIDTH = 100  # characters in a line of a printed chain


@dataclass(frozen=True)
class Chain:
    """The passes of a compilation, in order: first those that lead to the stage graph, then those
    from there to the pipeline graph, then those from the stage graph to the step graph.

    A chain is immutable: its methods return a new one. ``print(chain)`` shows it as a table.

    Raises ValueError if a pass is missing, or comes too late, that another one needs, or if no pass
    leads to one of the levels.
    """

    entries: tuple[Entry[Any], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            missing = [name for name in entry.needs if name not in seen]
            if missing:
                raise ValueError(
                    f"the pass {entry.name!r} needs {missing[0]!r} before it: keep "
                    f"{missing[0]!r}, put another pass in its place by "
                    f"replace({missing[0]!r}, ...), or leave {entry.name!r} out first"
                )
            seen.add(entry.name)
        reached = {entry.target for entry in self.entries if entry.source != entry.target}
        for level, name in _LEADING.items():
            if level not in reached:
                raise ValueError(
                    f"no pass leads to the {level} graph: keep {name!r}, or put another pass in "
                    f"its place by replace({name!r}, ...)"
                )

    def before(self, name: str, *passes: Pass | Entry[Any]) -> Chain:
        """A new chain, with ``passes`` ahead of the pass that is called ``name``.

        The added passes are given a graph of the level that the named pass takes.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        named = self.entries[at]
        own = [_own_entry(each, named.source, named.leads_to) for each in passes]
        return Chain((*self.entries[:at], *own, *self.entries[at:]))

    def after(self, name: str, *passes: Pass | Entry[Any]) -> Chain:
        """A new chain, with ``passes`` behind the pass that is called ``name``.

        The added passes are given a graph of the level that the named pass gives.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        named = self.entries[at]
        own = [_own_entry(each, named.target, named.leads_to) for each in passes]
        return Chain((*self.entries[: at + 1], *own, *self.entries[at + 1 :]))

    def without(self, *names: str) -> Chain:
        """A new chain, without the passes that have these names.

        Raises:
            ValueError: if no pass, or more than one, has such a name, or another pass that stays in
                the chain needs it.
        """
        left_out = {self._place(name) for name in names}
        return Chain(tuple(e for i, e in enumerate(self.entries) if i not in left_out))

    def replace(self, name: str, own: Pass | Entry[Any]) -> Chain:
        """A new chain, in which the pass ``own`` replaces the pass that is called ``name``.

        It gets the replaced pass's name. It has to take and give graphs of the same levels, and to
        write the same metadata (``node.meta``), since later passes read that.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        old = self.entries[at]
        new = _own_entry(own, old.source, old.leads_to)
        new = replace(new, name=name, source=old.source, target=old.target, needs=old.needs)
        return Chain((*self.entries[:at], new, *self.entries[at + 1 :]))

    def passes(
        self, context: Context, *, since: str | None = None, until: str | None = None
    ) -> Iterator[Pass]:
        """Yield the passes that lower a graph to the level that ``context`` is for, in order.

        Each pass is made when the caller asks for it. Passes that do not apply are left out.

        Args:
            context: what is known of the compilation, from which the passes are made.
            since: the name of the pass to begin with; None: the first one.
            until: the name of the pass to stop ahead of; None: go on to the end.
        """
        begin = 0 if since is None else self._place(since)
        end = len(self.entries) if until is None else self._place(until)
        for entry in self.entries[begin:end]:
            if entry.leads_to == context.leads_to and entry.applies(context):
                yield entry.make(context)

    def _place(self, name: str) -> int:
        """The index of the entry of that name."""
        places = [i for i, entry in enumerate(self.entries) if entry.name == name]
        if len(places) == 1:
            return places[0]
        if places:
            raise ValueError(
                f"{len(places)} passes of the chain are called {name!r}: give them different names"
            )
        names = [entry.name for entry in self.entries]
        near = difflib.get_close_matches(str(name), names)
        said = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {names}"
        raise ValueError(f"no pass of the chain is called {name!r}: {said}")

    def __str__(self) -> str:
        rows = [("pass", "graph", "what it does")]
        rows += [(entry.name, entry.levels, entry.summary) for entry in self.entries]
        first, second = (2 + max(len(row[i]) for row in rows) for i in (0, 1))
        lines = []
        for name, levels, about in rows:
            width = WIDTH - first - second
            parts = textwrap.wrap(about, width, break_on_hyphens=False) or [""]
            lines.append(f"{name:{first}}{levels:{second}}{parts[0]}".rstrip())
            lines += [" " * (first + second) + part for part in parts[1:]]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Entries of the default chain have functions that cannot be pickled: they go by name.
        known = {id(entry): entry.name for entry in default_chain().entries}
        return _restored, ([known.get(id(entry), entry) for entry in self.entries],)


def _restored(entries: Iterable[Entry[Any] | str]) -> Chain:
    known = {entry.name: entry for entry in default_chain().entries}
    return Chain(tuple(known[e] if isinstance(e, str) else e for e in entries))


def _own_entry(own: Pass | Entry[Any], level: Level, leads_to: Level) -> Entry[Any]:
    """The chain's entry for a pass that a user has written; ``level`` is that of its graphs."""
    if isinstance(own, Entry):
        return replace(own, leads_to=leads_to)
    if isinstance(own, type) or not callable(own):
        raise TypeError(
            f"{own!r} is no pass: give an object with a name that is called with a graph module "
            "and returns one, or a passes.chain.Entry, whose make is called when the pass is due"
        )
    name = getattr(own, "name", None) or getattr(own, "__name__", type(own).__name__)
    about = own if hasattr(own, "__name__") else type(own)
    return Entry(str(name), _AsItIs(own), level, level, about=_said_of(about), leads_to=leads_to)


def _said_of(documented: Any) -> type | str:
    return documented if isinstance(documented, type) else summary(documented)


@dataclass(frozen=True)
class _AsItIs:
    """The ``make`` of an entry whose pass a user has made already: it returns that pass."""

    given: Pass

    def __call__(self, context: Any) -> Pass:
        return self.given


_LEADING = {Level.STAGE: "split", Level.PIPELINE: "microbatch", Level.STEP: "step"}
_DEFAULT = Chain(ENTRIES)


def default_chain() -> Chain:
    """The chain that :func:`fxpipe.compile` runs, if it is not given another one."""
    return _DEFAULT


def chain_of(passes: Chain | None) -> Chain:
    """The chain that a user has given, or the default one.

    Raises TypeError for what is no chain.
    """
    if passes is not None and not isinstance(passes, Chain):
        raise TypeError(
            f"passes is a {type(passes).__name__}: give a chain, such as "
            'fxpipe.default_chain().before("split", your_pass)'
        )
    return default_chain() if passes is None else passes


def run(passes: Iterable[Pass], gm: fx.GraphModule) -> fx.GraphModule:
    """Run passes on a graph module, one after the other, and return the result of the last."""
    for rewrite in passes:
        gm = rewrite(gm)
    return gm
