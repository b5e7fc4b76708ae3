"""The house: who imports whom, as ``[tool.importlinter]`` in pyproject.toml says it."""

from importlinter.cli import lint_imports


def test_imports_point_one_way_and_make_no_circle():
    assert lint_imports(no_cache=True) == 0
