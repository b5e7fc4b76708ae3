"""Which room of the house imports which, and which files use private names of PyTorch."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import networkx as nx
import pytest

import fxpipe
import passes
from fxpipe.ir import _torch


def test_imports_point_one_way_and_make_no_circle():
    # In a process of its own, since it switches off all loggers of the process.
    run = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    subprocess.run([sys.executable, "-c", run], check=True)


def test_no_module_leads_back_to_itself_not_even_through_imports_in_functions():
    modules = grimp.build_graph("fxpipe", "passes", cache_dir=None)
    imports = nx.DiGraph(
        (module, imported)
        for module in modules.modules
        for imported in modules.find_modules_directly_imported_by(module)
    )
    circles = [sorted(c) for c in nx.strongly_connected_components(imports) if len(c) > 1]
    assert circles == []


FILES = sorted(
    path
    for package in (fxpipe, passes)
    for path in Path(package.__file__).parent.rglob("*.py")
    if path != Path(_torch.__file__)
)

OF_MODULES = {
    *("_parameters", "_buffers", "_modules", "_apply", "_is_full_backward_hook"),
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
}
"""Private names that subclasses and pickles of ``nn.Module`` commonly use, see
``fxpipe.ir._torch``."""
OF_PYTHON = {"_replace", "_getframe", "_fields"}  # names of named tuples and of ``sys``


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(tree):
    """The names that a file defines: functions, classes, and what is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def private_uses(tree, own):
    """The lines at which a file uses a private name of others, and that name."""
    allowed = own | OF_MODULES | OF_PYTHON
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            if not is_private(node.attr) or node.attr in allowed:
                continue
            is_operator = ast.unparse(node).startswith("torch.ops.aten.")
            names = [] if is_operator else [node.attr]
        else:
            continue
        for name in names:
            if any(map(is_private, name.split("."))):
                yield node.lineno, name


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


def test_private_names_of_pytorch_are_used_in_ir_torch_only(trees):
    own = {name for tree in trees.values() for name in own_names(tree) if is_private(name)}
    used = [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own)
    ]
    assert used == []


def test_strings_do_not_name_them_elsewhere_either(trees):
    private = {
        name
        for node in ast.walk(ast.parse(Path(_torch.__file__).read_text()))
        for name in (
            getattr(node, "attr", ""),
            getattr(node, "value", ""),
            getattr(node, "name", ""),
        )
        if isinstance(name, str) and name.isidentifier() and is_private(name)
    }
    assert {"_version", "_flat_weights", "_schema"} <= private
    spelled = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in private - OF_MODULES
    ]
    assert spelled == []


@pytest.mark.parametrize(
    "code, name",
    [
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch._C import thing", "torch._C.thing"),
        ("import torch._dynamo", "torch._dynamo"),
        ("torch._C.call()", "_C"),
        ("tensor._version", "_version"),
    ],
)
def test_such_a_use_would_be_noticed(code, name):
    assert [found for _, found in private_uses(ast.parse(code), set())] == [name]


def test_no_kind_of_accelerator_is_named_where_torch_accelerator_serves_all(trees):
    backends = {"cuda", "xpu", "mps", "mtia", "hpu", "npu"}
    named = [
        f"{path}:{node.lineno}: torch.{node.attr}"
        for path, tree in (
            trees | {_torch.__file__: ast.parse(Path(_torch.__file__).read_text())}
        ).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in backends
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert named == []


def test_the_documentation_lists_what_a_kind_of_accelerator_has_to_support(trees):
    """Each function of ``torch.accelerator`` that is called stands in ``docs/streams.rst``."""
    text = (Path(fxpipe.__file__).parents[1] / "docs" / "streams.rst").read_text()
    called = {
        node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.accelerator"
    }
    assert {"current_stream", "synchronize"} < called
    listed = text[text.index("What a kind of device has to support") :]
    assert {name for name in called if name not in listed} == set()


def test_no_two_classes_have_one_name_not_even_private_ones(trees):
    homes: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(str(path))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize("package", [fxpipe, passes])
def test_few_files_lie_beside_the_rooms(package):
    assert len(list(Path(package.__file__).parent.glob("*.py"))) <= 10
