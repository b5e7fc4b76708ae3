"""Draws the house: its rooms (the folders of ``fxpipe`` and ``passes``), the number of files in
each, and which room imports from which.

``python -m tests.house OUT.svg [CHECKOUT]`` draws the checkout that it runs in, or another one: an
older checkout beside today's shows what a restructuring has changed. Rooms that import each other
in a circle have red arrows; ``tests/test_house.py`` asserts that there are no such rooms.
"""

from __future__ import annotations

import sys
from pathlib import Path

import graphviz
import grimp
import networkx as nx

PACKAGES = "fxpipe", "passes"
FACADE = "fxpipe"  # this module names all that is public, and no room imports it


def rooms(modules: set[str]) -> dict[str, str]:
    """The room of each module: a folder of a package, or a file that lies beside the folders."""
    folders = {name.rpartition(".")[0] for name in modules}
    found = {}
    for name in modules:
        parts = name.split(".")
        room = ".".join(parts[:2])
        found[name] = room if len(parts) > 1 else f"{name}.__init__"
        if len(parts) > 1 and room not in folders and parts[0] == "passes":
            found[name] = "passes"  # passes that lie in no folder are one room
    return found


def picture(checkout: Path) -> graphviz.Digraph:
    """Rooms as boxes, those that import above those that are imported. An arrow is left out where a
    longer way leads to the same room."""
    sys.path.insert(0, str(checkout))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    room_of = rooms(graph.modules)
    imports: nx.DiGraph[str] = nx.DiGraph()
    files: dict[str, list[int]] = {}
    for module, room in room_of.items():
        if module == FACADE:
            continue
        path = checkout / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        files.setdefault(room, []).append(len(path.read_text().splitlines()))
        imports.add_node(room)
        for other in graph.find_modules_directly_imported_by(module):
            if other != FACADE and room_of[other] != room:
                imports.add_edge(room, room_of[other])
    knots = [knot for knot in nx.strongly_connected_components(imports) if len(knot) > 1]
    floors = nx.condensation(imports)
    inside = {room: i for i in floors for room in floors.nodes[i]["members"]}
    shown = {(inside[a], inside[b]) for a, b in imports.edges}
    kept = set(nx.transitive_reduction(nx.DiGraph(shown)).edges)
    drawn = graphviz.Digraph("house", graph_attr={"rankdir": "TB", "nodesep": "0.3"})
    drawn.attr("node", shape="box", fontname="Helvetica", fontsize="11")
    for room, lines in sorted(files.items()):
        count = (
            f"{len(lines)} files, {sum(lines):,} lines" if len(lines) > 1 else f"{lines[0]} lines"
        )
        drawn.node(room, f"{room}\n{count}")
    for one, other in imports.edges:
        is_circle = any({one, other} <= knot for knot in knots)
        if is_circle or (inside[one], inside[other]) in kept:
            drawn.edge(one, other, color="red" if is_circle else "gray40")
    return drawn


if __name__ == "__main__":
    out, *where = sys.argv[1:]
    drawn = picture(Path(*where).resolve() if where else Path.cwd())
    # This import comes last: grimp would take a package that is imported already for CHECKOUT's.
    from fxpipe.inspect.draw import render_svg

    Path(out).write_text(render_svg(drawn))
