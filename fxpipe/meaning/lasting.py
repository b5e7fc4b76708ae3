"""What a model keeps from one call to the next: buffers and parameters that its forward writes to,
and attributes of its modules that its forward changes.

::

    all rows at once     state ── 5 rows ── state after them
    in micro-batches     state ── 3 rows ── state ── 2 rows ── state after them       alike?

A micro-batch finds what the micro-batch before it has left. So a moving average takes several steps
for one mini-batch, a counter counts micro-batches, and a queue of keys from earlier rows has those
of the same mini-batch in it. Accumulating gradients over micro-batches by hand does the same, so
that a warning says it. A running maximum, on the other hand, is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.structure import leaves
from fxpipe.meaning.compare import Difference, difference
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.sample import part
from fxpipe.meaning.trial import Trial

Calls = Callable[[Sequence[list[Tensor]]], tuple[list[Any], dict[str, Tensor]]]
"""Calls a model on several lists of tensors, one after the other, and gives its outputs and, by
name, what its buffers and parameters hold after the last call."""

Keeping = Callable[[Sequence[str], Sequence[list[Tensor]]], list[Any]]
"""Does so where each call finds only some names' state as the call before it has left it, and the
rest as the first call finds it."""

SHOWN = 3  # the most names that a message lists


def lasting_problem(
    calls: Calls,
    keeping: Keeping,
    trial: Trial,
    dims: Sequence[int | None],
    changed: Sequence[str],
) -> Problem | None:
    """What differs if the parts of a sample find the state that the parts before them have left:
    an output, or the state itself, whose path is "state"; None if nothing does.

    Args:
        calls: calls the model.
        keeping: calls the model, keeping the state of some names only.
        trial: the sample.
        dims: the batch dimensions of the inputs.
        changed: the names of what the forward changes: buffers, parameters and attributes.
    """
    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    _, expected = calls([whole])
    parts = trial.each(dims)
    try:
        outputs, found = calls(parts)
    except Exception as error:
        if not is_the_models(error):
            raise
        return _of_equal_sizes(calls, keeping, trial, parts, changed)
    if problem := (
        _in_sequence(outputs, keeping, trial.parts, parts, trial.sizes, changed)
        or _of_equal_sizes(calls, keeping, trial, parts, changed)
    ):
        return problem
    rows, sizes = sum(trial.sizes), _then(trial.sizes)
    for name in changed:
        if name in expected and (apart := _apart(expected[name], found.get(name))):
            return Problem(
                "state",
                f"the forward changes {_listed(changed)}, which each micro-batch does by itself: "
                f"after {sizes} {name} differs by {apart} from what it is after {rows} rows "
                "at once",
            )
    return None


def _of_equal_sizes(
    calls: Calls,
    keeping: Keeping,
    trial: Trial,
    parts: Sequence[list[Tensor]],
    changed: Sequence[str],
) -> Problem | None:
    """The same of a model that only takes as many rows as the call before it had, or that begins
    anew with another number of rows, such as one that goes on from the hidden state of each row:
    the same rows come twice."""
    for tensors, alone, size in zip(parts, trial.parts, trial.sizes, strict=True):
        twice = [tensors, tensors]
        try:
            outputs, _ = calls(twice)
        except Exception as error:
            if not is_the_models(error):
                raise
            continue  # it takes no second call in the state that the first one leaves
        alones, sizes = [alone, alone], [size, size]
        if problem := _in_sequence(outputs, keeping, alones, twice, sizes, changed):
            return problem
    return None


def _in_sequence(
    outputs: Sequence[Any],
    keeping: Keeping,
    alone: Sequence[Mapping[str, Any]],
    calls: Sequence[list[Tensor]],
    sizes: Sequence[int],
    changed: Sequence[str],
) -> Problem | None:
    """How the outputs of calls, one after the other, differ from those of each call alone."""
    differing = next(_differing(outputs, alone), None)
    if differing is None:
        return None
    call, path, by = differing

    def matter(names: Sequence[str]) -> bool:
        try:
            kept = keeping(names, calls)
        except Exception as error:
            if not is_the_models(error):
                raise
            return True  # it does not run with this state and the first one of all others
        return any(path == other for _, other, _ in _differing(kept, alone))

    return Problem(
        path,
        f"{path} depends on the state that an earlier call leaves in "
        f"{_first(that_matter(changed, matter))}, and each micro-batch is a call: for "
        f"{_rows(sizes[call])} it differs by {by} where a call with {_then(sizes[:call])} comes "
        "ahead of it",
    )


def _then(sizes: Sequence[int]) -> str:
    return f"{' and then '.join(map(str, sizes))} {'row' if list(sizes) == [1] else 'rows'}"


def _rows(size: int) -> str:
    return _then([size])


def that_matter(names: Sequence[str], matter: Callable[[Sequence[str]], bool]) -> Iterator[str]:
    """Those of some names that matter, which all of them together do: some of them that matter by
    themselves, found by halves; or all, if neither half matters without the other one::

        a b c d e f g h       matter
        a b c d               do not
        e f g h               matter:  e f  do not,  g h  do:  g  does,  h  does not
    """
    half = len(names) // 2
    is_found = False
    for some in (names[:half], names[half:]) if half else ():
        if matter(some):
            is_found = True
            yield from that_matter(some, matter)
    if not is_found:
        yield from names


def _differing(
    outputs: Sequence[Any], alone: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, str, Difference]]:
    """The outputs that are others than those of each call alone: the number of the call, from zero,
    and the path of the output. What the first call gives depends on no call ahead of it."""
    for call, (output, own) in enumerate(zip(outputs, alone, strict=True)):
        for path, value in leaves(output, "output") if call else ():
            if apart := _apart(own.get(path), value):
                yield call, path, apart


def _apart(one: Any, other: Any) -> Difference | None:
    is_known = isinstance(one, Tensor) and isinstance(other, Tensor) and not one.is_meta
    return difference(one, other) if is_known else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


def _first(names: Iterator[str]) -> str:
    """Names that take time to be found: no more of them than are shown."""
    found = list(islice(names, SHOWN + 1))
    return ", ".join(found[:SHOWN]) + (" and others" if len(found) > SHOWN else "")
