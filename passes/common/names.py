"""How nodes of the model graph are named: by a user, in what is given to the passes "partition" and
"cost", and by the modules that they are part of.

The name of a node stands for that node, and the path of a module for all nodes of the module. The
end of a path does too, if a single module's path ends so: "h.2" for "transformer.h.2".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import fx


def named_nodes(work: Sequence[fx.Node], name: str) -> list[fx.Node]:
    """The nodes that a name stands for; an empty list if it stands for none, or if it is the end of
    several modules' paths (:func:`nothing_named` says which)."""
    found = [node for node in work if node.name == name or is_within(node, name)]
    if not found and len(paths := _that_end_with(work, name)) == 1:
        found = [node for node in work if is_within(node, paths[0])]
    return found


def nothing_named(work: Sequence[fx.Node], name: str) -> str:
    """The error message for a name that stands for no node. It suggests similar names."""
    if paths := _that_end_with(work, name):
        return (
            f"several modules have a path that ends so: give one of {', '.join(map(repr, paths))}"
        )
    known = {node.name for node in work} | set(_modules(work))
    close = difflib.get_close_matches(name, sorted(known), n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = f"it has {', '.join(repr(node.name) for node in work[:3])}, for example"
    return f"the model graph has no such module or node; {hint}"


def _that_end_with(work: Sequence[fx.Node], name: str) -> list[str]:
    """The paths of all modules that end with a name, in the order of the program."""
    return [path for path in _modules(work) if path.endswith(f".{name}")]


def _modules(work: Sequence[fx.Node]) -> list[str]:
    """The paths of all modules that have a node, and of the modules that contain these."""
    paths = dict.fromkeys(path for node in work for path in _paths(node))
    return list(dict.fromkeys(p for path in paths for p in accumulate(path.split("."), _joined)))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}"


def calls_of(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The calls of modules that a node is part of, the outermost first, without that of the model.
    Each is a pair of a key, by which two calls of one module differ, and of the module's path."""
    for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
        if path:
            yield str(key), str(path)


def _paths(node: fx.Node) -> set[str]:
    """The paths of the modules that a node belongs to."""
    paths = {path for _, path in calls_of(node)}
    if node.op == "call_module":
        paths.add(str(node.target))
    return paths


def is_within(node: fx.Node, name: str) -> bool:
    """Whether a node belongs to the module of that path, or to a module inside that module."""
    return any(path == name or path.startswith(f"{name}.") for path in _paths(node))
