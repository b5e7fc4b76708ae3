"""The zoo from the cache on disk: ``python -m tests.models.cached [NAMES]``.

Each model is compiled twice with one folder, and trained a step each time. The second time, it has
to come from the folder, and to give the very same bits; or the reason why it is not kept is shown.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

import torch

import fxpipe
from fxpipe.compiler.disk.slot import READ
from tests.models.compare import (
    CHUNKS,
    STAGES,
    batch_for,
    build,
    difference,
    one_thread,
    run_step,
)
from tests.models.registry import Entry, entries


def compiled(entry: Entry, training: bool, folder: str) -> tuple[str, float, Any]:
    """How the cache has served a model, the CPU seconds of the compilation, and what a step of
    training has come to."""
    with one_thread():
        torch.manual_seed(0)
        inputs = batch_for(entry)
        model = build(entry, training)
        options = {"check": "warn" if entry.across else True, **entry.options}
        with fxpipe.compile(
            model, ["cpu"] * STAGES, chunks=CHUNKS, cache=folder, **options
        ) as pipe:
            start = time.process_time()
            pipe.prepare(**inputs)
            seconds = time.process_time() - start
            step = run_step(model, lambda: [pipe(**inputs)])
            return pipe.compilations[-1].cache, seconds, step


def main(names: list[str]) -> None:
    counts: dict[str, int] = {}
    for entry in entries().values():
        if names and entry.name not in names:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("always", category=fxpipe.compiler.disk.errors.CacheWarning)
                _, first, expected = compiled(entry, True, folder)
                state, again, actual = compiled(entry, True, folder)
            same = difference(expected, actual) == 0
            said = f"{state}, {'the same' if same else 'OTHER'} bits, {first:.2f} s → {again:.2f} s"
            counts[state if same else "OTHER bits"] = counts.get(state, 0) + 1
        except Exception:
            said = traceback.format_exc(limit=-2)
        print(f"{entry.name}: {said}", flush=True)
    print(counts, f"{counts.get(READ, 0)} of {sum(counts.values())}")


if __name__ == "__main__":
    main(sys.argv[1:])
