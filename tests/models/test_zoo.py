"""Models from three libraries, unchanged, against the loop over their micro-batches.

These tests take a few of the models; ``python -m tests.models.table`` takes all.
"""

from __future__ import annotations

import pytest

from tests.models.compare import Step, compare, difference
from tests.models.registry import entries
from tests.models.table import END, FAMILIES, ROOT, START, TABLE, called

FAST = [entry for entry in entries().values() if entry.fast]

pytestmark = pytest.mark.one_thread  # as the loop in compare() has


@pytest.mark.covering(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [(True, "always"), (False, "never")], ids=called)
@pytest.mark.parametrize("entry", FAST, ids=lambda entry: entry.name)
def test_outputs_gradients_and_buffers_are_those_of_the_loop(entry, case):
    pytest.importorskip(entry.library)
    result = compare(entry, *case)
    assert result.is_good, f"differs by {result.difference} ({result.front_end})"


def test_the_table_has_all_models():
    page = TABLE.read_text()
    assert len(entries()) >= 60
    assert [name for name in entries() if f"| {name} |" not in page] == []
    readme = (ROOT / "README.md").read_text()
    assert f"{START}\nAll {len(entries())} models" in readme and END in readme
    assert f"All {len(entries())} work" in FAMILIES.read_text()


def test_a_difference_is_seen_wherever_it_is():
    import torch

    def step(output=1.0, gradient=1.0, buffer=1.0):
        return Step(
            {"y": torch.tensor([output, 4.0]), "n": 1},
            {"w": torch.tensor([gradient]), "unused": None},
            {"mean": torch.tensor([buffer])},
        )

    assert difference(step(), step()) == 0
    assert difference(step(), step(output=2.0)) == 0.25
    assert difference(step(), step(gradient=1.5)) == 0.5
    assert difference(step(), step(buffer=float("nan"))) != 0
    with pytest.raises(AssertionError, match="unused"):
        other = step()
        other.gradients["unused"] = torch.ones(1)
        difference(step(), other)
