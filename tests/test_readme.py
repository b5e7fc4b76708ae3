"""The README's examples run as they stand, its links lead somewhere, and the changelog has the
version."""

from __future__ import annotations

import re
from pathlib import Path

import fxpipe

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run_one_after_the_other():
    names: dict[str, object] = {}
    for example in re.findall("```python\n(.*?)```", README, re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)


def test_its_links_lead_somewhere():
    root = Path(__file__).parent.parent
    paths = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`(tests/[^`]+\.py)`", README)
    assert [path for path in paths if "://" not in path and not (root / path).exists()] == []


def test_the_changelog_has_the_version_that_is_installed():
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == fxpipe.__version__
