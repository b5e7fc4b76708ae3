"""Files that are no profiles and no schedules: whatever is in them, they are refused with a
message, or they can be used.

::

    python -m tests.bad_input.fuzz --inputs 10000
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from dataclasses import astuple
from pathlib import Path

import click
from hypothesis import Phase, settings
from hypothesis import given as with_inputs
from hypothesis import strategies as st

from fxpipe import Profile, Schedule, ScheduleError
from fxpipe.ir.cost import Cost
from fxpipe.schedule import validate
from passes.cost.given import ProfileError

NAMES = st.sampled_from(["format", "device", "costs", "first", "forward_s", "flops", "x"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(1)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
)
COSTS = st.dictionaries(st.text(max_size=5), VALUES | st.dictionaries(NAMES, LEAVES), max_size=3)
PROFILES = st.fixed_dictionaries(
    {"format": st.just(1) | LEAVES, "device": st.just("cpu") | LEAVES, "costs": COSTS | VALUES}
)
JSON = (PROFILES | VALUES).map(json.dumps)
NUMBERS = st.one_of(st.integers(0, 3), st.integers()).map(str)
CELLS = st.one_of(
    st.builds("{}{}{}".format, NUMBERS, st.sampled_from("FBIWQ"), NUMBERS),
    st.builds("({}F{};{}B{})OVERLAP_F_B".format, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["", ".", "0SEND_F0", "1RECV_B", '"', "\x00", "9" * 131073]),
    st.text(max_size=5),
)
CSV = st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=4).map("\n".join)


@st.composite
def files(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    """The content of a file: a text, or bytes of it, with or without a few other bytes within."""
    content = draw(texts).encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        at = draw(st.integers(0, len(content)))
        content = (
            content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 2)) :]
        )
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content


def check_profile(content: bytes) -> None:
    """Read a file as a profile: it is refused, or its costs are amounts and it can be saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        path.write_bytes(content)
        try:
            profile = Profile.load(path)
        except ProfileError as error:
            assert "give a file that" in str(error) or "measure again" in str(error)
            return
        assert profile.costs and all(isinstance(cost, Cost) for cost in profile.costs.values())
        amounts = [amount for cost in profile.costs.values() for amount in astuple(cost)]
        assert all(0 <= float(amount) < math.inf for amount in amounts)
        profile.save(path)
        assert Profile.load(path) == profile


def check_schedule(content: bytes) -> None:
    """Read a file as a schedule: it is refused, or it can be validated and written."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sends and receives are left out
        path = Path(folder, "schedule.csv")
        path.write_bytes(content)
        try:
            schedule = Schedule.from_csv(path)
        except ValueError as error:
            assert type(error) is ValueError and len(str(error)) < 500
            return
        schedule.to_csv(path)
        assert Schedule.from_csv(path) == schedule
        try:
            validate(schedule)
        except ScheduleError:
            return
        assert str(schedule) and schedule.placement


FUZZED = {"profiles": (check_profile, files(JSON)), "schedules": (check_schedule, files(CSV))}


def fuzz(kind: str, inputs: int) -> None:
    """Check files of a kind: so many, and the same ones each time."""
    check, contents = FUZZED[kind]
    how = settings(
        max_examples=inputs,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
    )
    how(with_inputs(contents)(check))()


@click.command()
@click.option("--inputs", default=10_000, show_default=True, help="Files of each kind.")
def main(inputs: int) -> None:
    """Check files of each kind."""
    for kind in FUZZED:
        fuzz(kind, inputs)
        print(f"{kind}: {inputs} files, none of which escaped", flush=True)


if __name__ == "__main__":
    main()
