"""Training steps as data: schedules, whether they can run, and how long they take.

Nothing here knows of tensors or devices: a schedule is a list of actions for each lane.
"""

from fxpipe.schedule.actions import Action, Entry, Kind, Overlap
from fxpipe.schedule.compare import Comparison, compare
from fxpipe.schedule.named import NAMES, named
from fxpipe.schedule.schedule import Edges, Needs, Schedule, chain
from fxpipe.schedule.search import Found, auto, search
from fxpipe.schedule.simulate import Edge, Link, Links, Memory, StageCost, simulate
from fxpipe.schedule.timeline import Span, Timeline, Transfer
from fxpipe.schedule.validate import Live, ScheduleError, live, validate

__all__ = [
    "NAMES",
    "Action",
    "Comparison",
    "Edge",
    "Edges",
    "Entry",
    "Found",
    "Kind",
    "Link",
    "Links",
    "Live",
    "Memory",
    "Needs",
    "Overlap",
    "Schedule",
    "ScheduleError",
    "Span",
    "StageCost",
    "Timeline",
    "Transfer",
    "auto",
    "chain",
    "compare",
    "live",
    "named",
    "search",
    "simulate",
    "validate",
]
