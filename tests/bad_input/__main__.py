"""``python -m tests.bad_input``: makes all wrong calls of the table, and prints their messages.

``--write`` writes them to ``messages.txt``: read what has changed before it is committed.
"""

from __future__ import annotations

import click

from tests.bad_input.table import TABLE, answered, entries


@click.command()
@click.option("--write", is_flag=True, help="Write the table anew, and print what has changed.")
def main(write: bool) -> None:
    """Print the message of each wrong call."""
    before = list(entries())
    now = [answered(entry) for entry in before]
    for entry, other in zip(now, before, strict=True):
        if not write or entry != other:
            print(entry)
    if write:
        TABLE.write_text("\n".join(map(str, now)), encoding="utf-8")
    print(f"{sum(bool(entry.call) for entry in now)} calls")


if __name__ == "__main__":
    main()
