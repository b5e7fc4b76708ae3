"""Given cost: the user gives the costs of nodes, as a dict or as a profile that has been saved when
costs were measured.

::

    {"conv1": 0.004, "layer1": 0.02}         seconds; a module's are divided among its nodes
    Profile.of(gm, "h200").save("unet.json") a profile of every node, to be loaded elsewhere
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.ir.cost import Cost
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.graph import COST, stage_nodes
from fxpipe.ir.text import kind, shortened
from passes.common.names import named_nodes, nothing_named
from passes.cost.analytic import ADAM, AnalyticCost

FORMAT = 1


class ProfileError(ValueError):
    """The given costs are no times or belong to another model, or their file is no profile."""


@dataclass(frozen=True)
class Profile:
    """The costs of a model's nodes, by name, for one mini-batch on one device."""

    costs: Mapping[str, Cost]
    device: str = ""

    @staticmethod
    def of(gm: fx.GraphModule, device: str = "") -> Profile:
        """A profile of the costs that the nodes of a model graph have now."""
        return Profile({node.name: node.meta[COST] for node in stage_nodes(gm.graph)}, device)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, in seconds and bytes."""
        costs = {name: asdict(cost) for name, cost in self.costs.items()}
        data = {"format": FORMAT, "device": self.device, "torch": torch.__version__, "costs": costs}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile that :meth:`save` has written.

        Raises :class:`ProfileError` for any other file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except RecursionError:
            raise _no_profile(path, "it is nested too deeply") from None
        except ValueError as error:  # no UTF-8, no JSON, or an integer of too many digits
            raise _no_profile(path, f"it is not JSON, {error}") from error
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise ProfileError(
                f"{path} is a profile of format {data['format']!r}; this is format {FORMAT}: "
                "measure again"
            )
        wrong = _wrong(data)
        if wrong is not None:
            raise _no_profile(path, wrong)
        costs = {
            name: Cost(**{key: value for key, value in cost.items() if key in _PARTS})
            for name, cost in data["costs"].items()
        }
        return Profile(costs, data["device"])


_PARTS = {part.name for part in fields(Cost)}
_KEYS = {"format": int, "device": str, "costs": dict}
_MOST = 2**63  # more seconds, bytes or FLOPs than a node can have


def _no_profile(path: str | Path, why: str) -> ProfileError:
    return ProfileError(f"{path} is no profile: {why}; give a file that Profile.save has written")


def _wrong(data: Any) -> str | None:
    """Say what is wrong with the content of a file that should be a profile; None if it is one."""
    if not isinstance(data, dict):
        return f"it holds {kind(data)} and not an object"
    for key, wanted in _KEYS.items():
        if key not in data:
            return f"it has no {key!r}"
        if not isinstance(data[key], wanted):
            return f"its {key!r} is {kind(data[key])} and not {kind(wanted())}"
    if not data["costs"]:
        return "its 'costs' are empty"
    for name, cost in data["costs"].items():
        if not isinstance(cost, dict):
            return f"its cost of {shortened(name)!r} is {kind(cost)} and not an object"
        for key in sorted(_PARTS.intersection(cost)):
            if not _is_amount(cost[key]):
                value = shortened(str(cost[key]))
                return f"its {key!r} of {shortened(name)!r} is {value} and not an amount, 0 or more"
    return None


def _is_amount(value: Any) -> bool:
    """Whether a value, which may be NaN, is a number of seconds, bytes or FLOPs."""
    return isinstance(value, int | float) and 0 <= value < _MOST


@dataclass(frozen=True)
class GivenCost:
    """Model graph with fake values (pass "alias") → the same, with the costs that are given.

    Args:
        costs: a dict from names of nodes or modules to seconds, forward and backward together: a
            third of them counts as the forward's, where there is a backward. Nodes that are not
            named take no time. Bytes and FLOPs are those of :class:`AnalyticCost`, unless a whole
            :class:`Cost` is given in place of the seconds. Or a :class:`Profile`, which has to name
            every node.
        device, optimizer_states, chunks, training: as for :class:`AnalyticCost`. Of a
            :class:`Profile` of training only the forward counts where there are no backwards.

    Raises :class:`ProfileError` for names that the model does not have, and for what is no time.
    """

    name: ClassVar[str] = "cost"
    costs: Mapping[str, float | Cost] | Profile
    device: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    chunks: int = 1
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = AnalyticCost(self.device, self.optimizer_states, self.chunks, self.training)(gm)
        work = {node.name: node for node in stage_nodes(gm.graph)}
        given: Mapping[str, float | Cost]
        if isinstance(self.costs, Profile):
            _check_whole(self.costs, work)
            # Passes that come later add nodes, such as those of shared parameters, to the graph of
            # a compiled model, of which the profile may be.
            given = {name: cost for name, cost in self.costs.costs.items() if name in work}
        else:
            given = self.costs
        _check_times(given)
        estimates = {node: node.meta[COST] for node in work.values()}
        for node, cost in estimates.items():
            node.meta[COST] = replace(
                cost, forward_s=0.0, backward_s=0.0, accumulation_s=0.0, again_s=0.0
            )
        # A longer path overrides a shorter one: {"encoder": 2.0, "encoder.head": 0.5}.
        for name in sorted(given, key=len):
            cost, nodes = given[name], _named(name, work)
            if not isinstance(cost, Cost):
                shares = _shares(nodes, estimates)
                timed = {node: _timed(estimates[node], cost * shares[node]) for node in nodes}
            elif len(nodes) == 1:
                timed = {nodes[0]: _with_products(cost, estimates[nodes[0]])}
            else:
                raise ProfileError(
                    f"costs gives a Cost for {name!r}, which is {len(nodes)} nodes: give seconds, "
                    "which are shared among them, or a Cost for each"
                )
            for node, its in timed.items():
                node.meta[COST] = its if self.training else _of_forward(its, estimates[node])
        return gm


def _timed(estimate: Cost, seconds: float) -> Cost:
    forward = seconds / 3 if estimate.backward_s else seconds
    backward = seconds - forward
    again = forward * estimate.part_again
    return replace(
        estimate, forward_s=forward, backward_s=backward, accumulation_s=0.0, again_s=again
    )


def _with_products(cost: Cost, estimate: Cost) -> Cost:
    """A given cost. If it does not say what products are worth, the estimate says it."""
    if cost.again_s or cost.product_bytes:
        return cost
    again = cost.forward_s * estimate.part_again
    kept, count = estimate.product_bytes, estimate.operators
    return replace(cost, again_s=again, product_bytes=kept, operators=count)


def _of_forward(cost: Cost, estimate: Cost) -> Cost:
    """The part of a given cost that a forward alone has."""
    return replace(estimate, forward_s=cost.forward_s, flops=cost.flops)


def _shares(nodes: list[fx.Node], estimates: Mapping[fx.Node, Cost]) -> dict[fx.Node, float]:
    """The fraction of a module's time that each of its nodes takes, by the estimated costs."""
    total = sum(estimates[node].seconds for node in nodes)
    return {node: estimates[node].seconds / total if total else 1 / len(nodes) for node in nodes}


def _named(name: str, work: Mapping[str, fx.Node]) -> list[fx.Node]:
    """The node of that name, else all nodes of the module of that name. The node comes first, so
    that several calls of one module can be given different costs."""
    if name in work:
        return [work[name]]
    found = named_nodes([*work.values()], name)
    if not found:
        raise ProfileError(f"costs names {name!r}, but {nothing_named([*work.values()], name)}")
    return found


def _check_times(given: Mapping[str, float | Cost]) -> None:
    for name, cost in given.items():
        if not isinstance(name, str):
            raise ProfileError(f"costs names {name!r}: give names of nodes or modules, as strings")
        times = (cost.forward_s, cost.backward_s) if isinstance(cost, Cost) else (cost,)
        if not all(isinstance(time, int | float) and 0 <= time < math.inf for time in times):
            raise ProfileError(
                f"costs gives {cost!r} for {name!r}: give seconds, 0 or more, or a Cost of seconds"
            )


def _check_whole(profile: Profile, work: Mapping[str, fx.Node]) -> None:
    missing = [name for name in work if name not in profile.costs]
    if missing:
        raise ProfileError(
            f"the profile is of another model: it has no cost of {missing[0]!r} ({len(missing)} "
            f"such node{'s' * (len(missing) != 1)} of {len(work)}); measure this model"
        )
