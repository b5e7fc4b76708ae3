"""Situations in which a function is checkpointed, for ``fxpipe.checkpoint`` and for PyTorch's.

Each module has the situations of one kind, and :mod:`tests.checkpoint_cases.harness` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.checkpoint_cases import (
    backwards_within,
    compiled,
    contexts,
    errors,
    functions,
    hooks,
    inputs_and_outputs,
    lifetime,
    modes,
    nested,
    random_numbers,
    state,
    transforms,
)
from tests.checkpoint_cases.harness import Case, Outcome, equal, verdict

__all__ = ["CASES", "Case", "Outcome", "equal", "rows", "verdict"]

CASES: list[Case] = [
    *functions.CASES,
    *nested.CASES,
    *inputs_and_outputs.CASES,
    *modes.CASES,
    *hooks.CASES,
    *random_numbers.CASES,
    *state.CASES,
    *errors.CASES,
    *backwards_within.CASES,
    *transforms.CASES,
    *compiled.CASES,
    *contexts.CASES,
    *lifetime.CASES,
]


def rows() -> Iterator[tuple[str, str, Outcome, str, Outcome]]:
    """For each situation: its name; verdict and outcome of PyTorch's, and of ours."""
    for case in CASES:
        plain, theirs, ours = (case.outcome(kind) for kind in ("plain", "torch", "ours"))
        yield case.name, verdict(theirs, plain), theirs, verdict(ours, plain), ours
