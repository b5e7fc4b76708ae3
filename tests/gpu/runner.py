"""Runs parts one after the other, each in a process of its own, and writes down their outcomes.

The processes are forked from a server that has imported PyTorch and has not touched a GPU, so that
no part spends seconds on imports. A part that sets environment variables gets a new interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from tests.accelerator.sim.build import built, compiler
from tests.gpu.part import ERROR, KILLED, OK, SKIPPED, Outcome, Part, Report, Skip, write_json
from tests.gpu.table import write_table

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else bits depend on which streams run when
    "TOKENIZERS_PARALLELISM": "false",
}
PRELOADED = ["tests.gpu.preload"]


class Runner:
    """Runs parts in order, and keeps ``results.json`` and ``results.txt`` up to date.

    Args:
        parts: in order.
        folder: of the results.
        dry: run on the simulated accelerator.
        seconds: for all parts together; those that do not get their turn are skipped.
        say: called with each part's outcome once it is there.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        folder: Path,
        *,
        dry: bool,
        seconds: float,
        say: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.parts, self.folder, self.dry, self.limit, self.say = parts, folder, dry, seconds, say
        self.outcomes = [Outcome(part.name, part.title) for part in parts]
        self.started, self._begin = datetime.now(UTC), time.monotonic()
        os.environ.update(ENVIRONMENT)

    def run(self) -> list[Outcome]:
        """All parts. Returns what became of each."""
        for folder in (self.folder, self._scratch(), self._logs()):
            folder.mkdir(parents=True, exist_ok=True)
        self.write(is_complete=False)
        self._warm_up()
        for index, part in enumerate(self.parts):
            left = self.limit - (time.monotonic() - self._begin)
            if left < min(5.0, part.seconds):
                outcome = self.outcomes[index]
                outcome.status, outcome.why = SKIPPED, "no time is left"
            else:
                self.outcomes[index] = self._run(part, min(part.seconds, left))
            self.write(is_complete=False)
            self.say(self.outcomes[index])
        self.write(is_complete=True)
        return self.outcomes

    def write(self, is_complete: bool) -> None:
        """Write what is known by now."""
        results = {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._begin, 1),
            "dry_run": self.dry,
            "complete": is_complete,
            "parts": [asdict(outcome) for outcome in self.outcomes],
        }
        write_json(self.folder / "results.json", results)
        write_table(self.folder / "results.txt", results, self.outcomes)

    def _run(self, part: Part, limit: float) -> Outcome:
        """One part in its process, for so many seconds at the most."""
        said, begin = self._scratch() / f"{part.name}.json", time.monotonic()
        said.unlink(missing_ok=True)
        process = self._started(part, said, limit)
        process.join(limit)
        took, is_late = time.monotonic() - begin, process.is_alive()
        _kill(process)
        outcome = Outcome(**json.loads(said.read_text())) if said.exists() else None
        outcome = outcome or Outcome(part.name, part.title)
        outcome.seconds = round(took, 1)
        log = (self._logs() / f"{part.name}.txt").relative_to(self.folder)
        if is_late:
            outcome.status, outcome.why = KILLED, f"it took more than {limit:.0f} s, see {log}"
        elif process.exitcode != 0:
            outcome.status = KILLED
            outcome.why = f"its process ended with exit code {process.exitcode}, see {log}"
        return outcome

    def _warm_up(self) -> None:
        """Start the server, and build the simulated accelerator, on no part's time."""
        if self.dry and compiler() is not None:
            built()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=int)
        process.start()
        process.join(self.limit)

    def _started(self, part: Part, said: Path, limit: float) -> BaseProcess:
        log = self._logs() / f"{part.name}.txt"
        context = multiprocessing.get_context("spawn" if part.environment else "forkserver")
        work = part, self.folder, said, log, self.dry, limit
        process = context.Process(target=_in_process, args=work)
        with patch.dict(os.environ, part.environment):
            process.start()
        return process

    def _scratch(self) -> Path:
        return self.folder / "parts"

    def _logs(self) -> Path:
        return self.folder / "logs"


def _kill(process: BaseProcess) -> None:
    """End a part's process, and the processes that it has started."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(10)


def _in_process(part: Part, folder: Path, said: Path, log: Path, dry: bool, limit: float) -> None:
    """What the new process does. Whatever it prints goes to a log, and, shortly before it is killed
    for its time, where each of its threads is."""
    os.setsid()  # a group of its own, to be killed with all that it starts
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.dump_traceback_later(max(1.0, limit - 2), file=sys.__stderr__)
    report = Report(Outcome(part.name, part.title), folder, said)
    try:
        from tests.gpu.machine import machine_for

        machine = machine_for(part, dry)
        part.load()(machine, report)
        for race in machine.races():
            report.problem(f"race: {race}")
        report.end(OK)
    except Skip as reason:
        report.end(SKIPPED, str(reason))
    except BaseException as error:
        text = traceback.format_exc()
        print(text)
        report.end(ERROR, f"{type(error).__name__}: {str(error)[:500]}", text)
