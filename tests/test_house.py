"""The house: who imports whom, as ``[tool.importlinter]`` in pyproject.toml says it."""

import grimp
import networkx as nx
from importlinter.cli import lint_imports


def test_imports_point_one_way_and_make_no_circle():
    assert lint_imports(no_cache=True) == 0


def test_no_module_leads_back_to_itself_not_even_through_imports_in_functions():
    modules = grimp.build_graph("fxpipe", "passes", cache_dir=None)
    imports = nx.DiGraph(
        (module, imported)
        for module in modules.modules
        for imported in modules.find_modules_directly_imported_by(module)
    )
    circles = [sorted(c) for c in nx.strongly_connected_components(imports) if len(c) > 1]
    assert circles == []
