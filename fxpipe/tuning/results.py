"""What tuning has tried: the trials, the best of them, a table, a picture and a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from fxpipe.ir.text import human_bytes, human_time, rendered
from fxpipe.tuning.pareto import front, picture
from passes.common.segments import in_words
from passes.partition.automatic import DoesNotFit


@dataclass(frozen=True)
class TuningTrial:
    """One way to run the model, and what is predicted for it.

    Attributes:
        options: the arguments of :func:`fxpipe.compile`: "chunks", "schedule", "checkpoint" and
            "partition"; "stages" if their number was given; and "checkpoint_segments" if there are
            several.
        seconds: the predicted time of a training step; inf if it does not fit.
        memory: the predicted bytes of each lane at the most; if it does not fit, those of the plan
            that is short of fewest.
        bubble: the predicted fraction of the lanes' time in which they are idle.
        measured: the measured time of a step in seconds; None: it has not been measured.
        why: why it does not fit, or could not be measured; empty otherwise.
    """

    options: Mapping[str, Any]
    seconds: float
    memory: tuple[float, ...] = ()
    bubble: float = 0.0
    measured: float | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory that it is predicted to need."""
        return math.isfinite(self.seconds)

    @property
    def key(self) -> tuple[float, float]:
        """By what trials are compared: those that have been measured come first, by that time."""
        return (math.inf, self.seconds) if self.measured is None else (self.measured, self.seconds)


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` has tried; ``str`` of it is a table, the best first.

    Attributes:
        trials: the ways to run the model, the best first.
        plain: the measured seconds of a step of the model by itself, without a pipeline, on the
            first device; None if nothing was measured, or if the device has not enough memory.
        advice: if nothing fits, what would; else empty.
    """

    trials: tuple[TuningTrial, ...]
    plain: float | None = None
    advice: str = ""

    @property
    def best(self) -> TuningTrial:
        """The fastest trial: ``fxpipe.compile(model, devices, **tuning.best.options)``.

        Raises :class:`fxpipe.DoesNotFit` if none fits.
        """
        found = min(self.trials, key=lambda trial: trial.key)
        if not found.fits:
            raise DoesNotFit(f"nothing that was tried fits; {self._why_none}")
        return found

    @property
    def _why_none(self) -> str:
        """Why the setting does not fit that is nearest to it, and what would fit."""
        nearest = self.trials[0]
        parts = [f"{said(nearest)}: {nearest.why}", *[self.advice] * bool(self.advice)]
        return "; ".join(parts)

    @property
    def front(self) -> tuple[TuningTrial, ...]:
        """The trials for which no other one is both faster and takes less memory on its fullest
        device (the Pareto front), the fastest first."""
        fitting = [trial for trial in self.trials if trial.fits]
        points = [(trial.seconds, max(trial.memory)) for trial in fitting]
        return tuple(fitting[i] for i in front(points))

    def draw(self) -> str:
        """The trials as points, time against memory, with the front as a line, in SVG."""
        fitting = [trial for trial in self.trials if trial.fits]
        points = [(trial.seconds, max(trial.memory)) for trial in fitting]
        return picture(points, [said(trial) for trial in fitting])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trials to a file, as JSON."""
        trials = [
            {
                **vars(trial),
                "seconds": trial.seconds if trial.fits else None,
                "memory": list(trial.memory),
            }
            for trial in self.trials
        ]
        written: dict[str, Any] = {"fxpipe tuning": 1, "plain": self.plain, "trials": trials}
        if self.advice:
            written["advice"] = self.advice
        Path(path).write_text(json.dumps(written, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tuning:
        """Read a file that :meth:`save` has written.

        Raises ValueError for another file.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            trials = [
                TuningTrial(
                    dict(each["options"]),
                    math.inf if each["seconds"] is None else float(each["seconds"]),
                    tuple(map(float, each["memory"])),
                    float(each["bubble"]),
                    None if each["measured"] is None else float(each["measured"]),
                    str(each["why"]),
                )
                for each in read["trials"]
            ]
            plain = read.get("plain")  # files of earlier versions have none
            plain = None if plain is None else float(plain)
            return Tuning(tuple(trials), plain, str(read.get("advice", "")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no file that Tuning.save has written ({error})") from error

    def __rich__(self) -> Group:
        table = Table(title="tuning", title_justify="left")
        table.add_column("schedule")
        for column in ("stages", "chunks"):
            table.add_column(column, justify="right")
        table.add_column("checkpoint")
        is_measured = any(trial.measured is not None for trial in self.trials)
        for column in ("predicted", *["measured"] * is_measured, "bubble", "most memory"):
            table.add_column(column, justify="right")
        fitting = [trial for trial in sorted(self.trials, key=lambda t: t.key) if trial.fits]
        for trial in fitting or self.trials:
            partition = trial.options.get("partition")
            table.add_row(
                str(trial.options["schedule"]),
                str(1 + max(partition.values())) if partition else "",
                str(trial.options["chunks"]),
                _modes(trial),
                human_time(trial.seconds) if trial.fits else "does not fit",
                *["" if trial.measured is None else human_time(trial.measured)] * is_measured,
                f"{trial.bubble:.0%}" if trial.fits else "",
                (human_bytes(round(max(trial.memory))) if trial.memory else "")
                + " *" * (trial in self.front),
            )
        said_of_all = f"{len(fitting)} of {len(self.trials)} settings fit"
        lines = [f"{said_of_all}; * none is both faster and smaller"]
        if not fitting:
            lines = [f"{said_of_all}; the nearest is {self._why_none}"]
        if self.plain is not None:
            took = human_time(self.plain)
            lines.append(f"without a pipeline, on the first device, a step was measured at {took}")
            measured = [trial.measured for trial in self.trials if trial.measured is not None]
            if measured and self.plain < min(measured):
                lines[-1] += ", which is faster than each setting that was measured"
        return Group(table, *lines)

    def __str__(self) -> str:
        return rendered(self)


def said(trial: TuningTrial) -> str:
    """What distinguishes a trial from others, in words."""
    options = trial.options
    return f"{options['schedule']}, {options['chunks']} chunks, checkpoint {_modes(trial)}"


def _modes(trial: TuningTrial) -> str:
    """The checkpoint modes of a trial, and the numbers of segments if there are several."""
    return in_words(trial.options["checkpoint"], trial.options.get("checkpoint_segments", 1))
