"""How Sphinx builds the API reference: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed
import torch.distributed.device_mesh

import fxpipe.api

# The signature of compile() has these names for type checkers only: Sphinx looks them up, too.
vars(fxpipe.api).update(
    ProcessGroup=torch.distributed.ProcessGroup,
    DeviceMesh=torch.distributed.device_mesh.DeviceMesh,
)

project = "fxpipe"
copyright = "the fxpipe authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "fxpipe"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide.css"]  # for the pictures in docstrings
highlight_language = "none"  # of what is not said to be Python: pictures

default_role = "code"
add_module_names = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 96
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

# A name that leads nowhere is an error (-n). Names of other projects lead nowhere on purpose: the
# reference is built without a network. So do types that are nobody's business but ours.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|fx|nn|pytree|graphviz|os|pathlib|collections|concurrent|contextlib|datetime|fractions|types)\..*",
    ),
    (r"py:.*", r".*\.[A-Z]"),  # type variables
    (r"py:.*", r"fxpipe\.(runtime|compiler|inspect\.step_work)\..*|.*\._\w+"),
    (r"py:.*", r"passes\.(partition\.(problem|cut|shift)|verify\.visit|common\.shapes)\..*"),
]


def _no_type_in_front(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Napoleon takes what an attribute's first line has before a colon for its type: skip it."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # a comment


def _made_anew(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """A default that a dataclass makes anew each time is no Python as ``inspect`` writes it."""
    return (signature and signature.replace("<factory>", "...")), returns


def _wherever_it_is(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A name of ours leads to the only thing that is called so, however it is imported."""
    path, _, last = node["reftarget"].rpartition(".")
    if node.get("refdomain") != "py" or (path and path.split(".")[0] not in ("fxpipe", "passes")):
        return None
    found = {
        entry.node_id: entry
        for _, entry in env.domains.python_domain.find_obj(env, None, None, last, None, 1)
    }
    if len(found) != 1:
        return None
    (entry,) = found.values()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)


class _ChainList(Directive):
    """The passes in the order in which they run, as the chain itself prints them."""

    def run(self) -> list[nodes.Node]:
        from passes import default_chain  # once the path is set

        return [nodes.literal_block(text=str(default_chain()))]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("chain", _ChainList)
    app.connect("autodoc-process-docstring", _no_type_in_front, priority=400)
    app.connect("autodoc-process-signature", _made_anew)
    app.connect("missing-reference", _wherever_it_is)
