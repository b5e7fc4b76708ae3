"""The README's examples run as they stand, give the output that it shows, and its links lead
somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fxpipe
from tests.zoo import MLP

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run_one_after_the_other():
    names = {"devices": ["cpu", "cpu"]}
    for example in re.findall("```python\n(.*?)```", README, re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)


def test_the_code_of_a_pipeline_begins_as_shown():
    (shown,) = re.findall("```\n(def forward.*?)```", README, re.DOTALL)
    with fxpipe.compile(MLP(), devices=["cpu", "cpu"], chunks=2) as pipe:
        pipe.prepare(torch.randn(4, 12))
        assert pipe.code.startswith(shown)


def test_its_links_lead_somewhere():
    root = Path(__file__).parent.parent
    paths = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`(tests/[^`]+\.py)`", README)
    assert [path for path in paths if "://" not in path and not (root / path).exists()] == []


def test_the_changelog_has_the_version_that_is_installed():
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == fxpipe.__version__
