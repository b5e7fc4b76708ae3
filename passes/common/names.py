"""How a user names nodes of the model graph, in what is given to the passes "partition" and "cost".

The name of a node stands for that node, and the path of a module for all nodes of the module.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import fx


def nothing_named(work: Sequence[fx.Node], name: str) -> str:
    """The error message for a name that no node and no module has. It suggests similar names."""
    known = {node.name for node in work} | {path for node in work for path in _paths(node)}
    close = difflib.get_close_matches(name, sorted(known), n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = f"it has {', '.join(repr(node.name) for node in work[:3])}, for example"
    return f"the model graph has no such module or node; {hint}"


def _paths(node: fx.Node) -> set[str]:
    """The paths of the modules that a node belongs to."""
    paths = {path for path, _ in node.meta.get("nn_module_stack", {}).values() if path}
    if node.op == "call_module":
        paths.add(str(node.target))
    return paths


def is_within(node: fx.Node, name: str) -> bool:
    """Whether a node belongs to the module of that path, or to a module inside that module."""
    return any(path == name or path.startswith(f"{name}.") for path in _paths(node))
