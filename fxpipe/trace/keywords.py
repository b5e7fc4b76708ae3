"""Names that are keywords of Python, as in ``nn.ModuleDict({"class": ..., "box": ...})``.

A graph is run as code of Python, in which fx writes ``self.heads.class``: a syntax error.
"""

from __future__ import annotations

from keyword import iskeyword

from torch import fx

from fxpipe.trace.errors import Refused

_READ = "call_module", "get_attr"


def refuse_keywords(graph: fx.Graph) -> None:
    """Raise ``Refused`` if a node calls a module, or reads a tensor, whose name is a keyword."""
    for node in graph.nodes:
        for name in str(node.target).split(".") if node.op in _READ else ():
            if iskeyword(name):
                raise Refused(
                    f"{node.target} cannot be written in the code of a graph, since {name!r} is a "
                    f"keyword of Python: give it another name in the model, such as {name + '_'!r}"
                )
