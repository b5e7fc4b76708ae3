"""``python -m tests.faults``: the whole table of faults, with what goes wrong, if anything does."""

from __future__ import annotations

from collections import Counter

import click

from tests.faults.table import KINDS, SETTINGS, Subject, cells


@click.command()
@click.option("--every", default=1, show_default=True, help="Only each so-manieth fault.")
def main(every: int) -> None:
    """Let each fault happen, and print a table: places, and how many faults of each kind did no
    harm."""
    harm = 0
    for setting in SETTINGS:
        subject = Subject(setting)
        done: dict[str, Counter[str]] = {}
        wrong = []
        for place, number, kind in list(cells(subject))[::every]:
            said = subject.fails((place, number), kind)
            done.setdefault(place, Counter())[kind] += said is None
            if said is not None:
                wrong.append(f"    {kind} at {place}, micro-batch {number}: {said}")
        grown = subject.living() - subject.tensors
        if grown > 0:
            wrong.append(f"    {grown} tensors more than before all faults")
        print(f"{setting}: " + ", ".join(KINDS))
        for place, kinds in done.items():
            print(f"    {place:32}" + " ".join(f"{kinds[kind]:3}" for kind in KINDS))
        print("\n".join(wrong), end="\n" if wrong else "", flush=True)
        harm += len(wrong)
        subject.pipe.close()
    raise SystemExit(harm > 0)


if __name__ == "__main__":
    main()
