"""Training steps as data: schedules, the check that they can run, and the time that they take.

Nothing here knows of tensors or devices: a schedule is a list of actions for each lane.
"""

from fxpipe.schedule.actions import Action, Entry, Kind, Overlap
from fxpipe.schedule.automatic import Found, auto, search
from fxpipe.schedule.catalogue import ALL_FORWARDS, NAMES, named, stages_per_lane
from fxpipe.schedule.choice import AUTO, microbatches_of, placement_of, schedule_of
from fxpipe.schedule.comparison import Comparison, compare
from fxpipe.schedule.forwards import forwards, simulate_forwards
from fxpipe.schedule.halves import joined
from fxpipe.schedule.memory import Live, Memory, WhileRunning, Workspace, live, peaks
from fxpipe.schedule.occupancy import Span, Transfer
from fxpipe.schedule.problem import NoRoom
from fxpipe.schedule.schedule import Edges, Needs, Schedule, chain
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.validator import ScheduleError, validate
from fxpipe.schedule.world import Edge, Link, Links, StageCost

__all__ = [
    "ALL_FORWARDS",
    "AUTO",
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
    "NoRoom",
    "Overlap",
    "Schedule",
    "ScheduleError",
    "Span",
    "StageCost",
    "Timeline",
    "Transfer",
    "WhileRunning",
    "Workspace",
    "auto",
    "chain",
    "compare",
    "forwards",
    "joined",
    "live",
    "microbatches_of",
    "named",
    "peaks",
    "placement_of",
    "schedule_of",
    "search",
    "simulate",
    "simulate_forwards",
    "stages_per_lane",
    "validate",
]
