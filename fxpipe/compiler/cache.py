"""The cache of the modes that have been compiled for a model. A call looks its mode up in two ways.

::

    call ── signature ── modes that have served an equal call      fast: checks guards on the model
       `─── all modes                                              slow: checks all guards
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.on_call import ShapeGuard
from fxpipe.compiler.guards.signature import signature
from fxpipe.compiler.operands import differ_by_operands
from fxpipe.ir.log import warn
from fxpipe.trace.premises import Premises
from fxpipe.trace.unregistered import paths_of

MANY = 100  # the most modes, and the most signatures of calls, that are kept
OFTEN = 8  # after so many compilations for other constants or attributes a warning says why


class Cache:
    """The modes that have been compiled for a model, looked up by the calls that they serve."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modes: list[Mode] = []
        self._served: dict[Any, list[tuple[Mode, list[int]]]] = {}

    def forget(self) -> None:
        """Forget every mode, so that the next call is compiled."""
        self.modes.clear()
        self._served.clear()

    def drop(self, mode: Mode) -> None:
        """Forget one mode, so that its calls are compiled anew."""
        self.modes = [each for each in self.modes if each is not mode]
        self._served.clear()

    def at_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any]] | None:
        """The fast look-up, by a call's signature: a mode that has served an equal call and whose
        guards on the model still hold, and the values of its inputs. None if there is none."""
        found, tensors = signature(args, kwargs)
        for mode, order in self._served.get(found, ()):
            if mode.guards.hold():
                return mode, [tensors[i] for i in order]
        return None

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode, values: list[Any]
    ) -> None:
        """Enter a mode for the fast look-up of calls with the signature of this one. ``values`` are
        the call's tensors in the order of the graph's inputs."""
        found, tensors = signature(args, kwargs)
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        if found is None:
            return
        if any(id(value) not in places for value in values):  # bind has cut lists into parts
            return
        if len(self._served) > MANY:
            self._served.clear()
        served = self._served.setdefault(found, [])
        served.append((mode, [places[id(value)] for value in values]))
        del served[:-OFTEN]

    def mode(self, call: GuardedCall) -> Mode | None:
        """The slow look-up: the oldest mode whose guards hold for a call; None if there is none."""
        return next((mode for mode in self.modes if mode.guards.serve(call)), None)

    def learn(self, mode: Mode) -> Mode:
        """Enter a mode that has just been compiled, and return it.

        If an older mode, whose guards have failed since the model has changed, equals the new one,
        the change makes no difference: then the older mode's guards are widened, and it is
        returned in place of the new one.
        """
        if len(self.modes) > MANY:
            self.forget()
        if not self._tell_of_constants(mode):
            self._tell_of_constants(mode, "arguments")
        self._tell_of_shapes(mode)
        alike = [other for other in self.modes if other.guards.like(mode.guards, "state")]
        states = [state for each in alike for state in each.guards.state.premises]
        if len(states) == OFTEN - 1:
            self._tell_of_attributes(states[-1])
        for each in alike:
            if not each.guards.hold() and each.equals(mode):
                state = each.guards.state
                state.widen(mode.guards.state, each.kept_modules(self.model))
                del state.premises[:-OFTEN]
                return each
        dropped = set(map(id, alike[: max(0, len(alike) + 1 - OFTEN)]))
        self.modes = [*(each for each in self.modes if id(each) not in dropped), mode]
        return mode

    def _tell_of_constants(self, mode: Mode, *but: str) -> bool:
        """Warn if this is compilation number OFTEN of calls that differ only in arguments, or parts
        of arguments, that are no tensors. Returns whether it has warned.

        Args:
            but: kinds of guards that are left out as well: without "arguments" there may be other
                numbers of such parts in each call.
        """
        alike = [e for e in self.modes if e.guards.like(mode.guards, "constant", "state", *but)]
        now, *others = [
            {guard.path: guard.value for guard in each.guards.constants} for each in (mode, *alike)
        ]
        distinct = [each for i, each in enumerate(others) if each not in others[:i]]
        if len(distinct) + 1 != OFTEN or now in distinct:
            return False
        last = distinct[-1]
        path = next(each for each in [*now, *last] if now.get(each) != last.get(each))
        shown = "there is none in this one"
        for guard in mode.guards.constants:
            if guard.path == path:
                shown = f"{guard.shown} in this one"
        text = (
            f"{type(self.model).__name__} has been compiled {OFTEN} times, since {path}, which is "
            f"no tensor, differs between the calls ({shown})"
        )
        if all(mode.equals(each) for each in alike):
            unused = _without_tensors(path, [each.path for each in mode.guards.shapes])
            warn(
                f"{text}. All of these programs are alike, so that the model seems to make no use "
                f"of it: leave {unused} out of the call, or give the same in each call"
            )
        elif all(differ_by_operands(*_graphs(mode, each)) for each in alike):
            warn(f"{text}: leave out what the model does not need, and give numbers as tensors")
        else:
            warn(
                f"{text}. What the model computes depends on it, as on the number of rounds of a "
                "loop: each of its values has a program of its own, so that few values should "
                "take turns; give a number as a tensor where the model takes one, and leave out of "
                "the call what it does not need"
            )
        return True

    def _tell_of_shapes(self, mode: Mode) -> None:
        """Warn if this is compilation number OFTEN of calls that differ only in the shapes of
        tensors, and name the dimension."""
        but = "shape", "sizes", "rows", "state"
        alike = [each.guards for each in self.modes if each.guards.like(mode.guards, *but)]
        if len(alike) + 1 != OFTEN:
            return
        for guard, *before in zip(mode.guards.shapes, *(g.shapes for g in alike), strict=True):
            for dim in guard.fixed:
                sizes = dict.fromkeys(each.shape[dim] for each in before if dim in each.fixed)
                if len(sizes) > 1:
                    warn(self._about_a_size(guard, dim, list(sizes)))
                    return

    def _about_a_size(self, guard: ShapeGuard, dim: int, sizes: list[int]) -> str:
        """A warning that calls which differ in the size of a dimension are compiled one by one."""
        name, path, reason = type(self.model).__name__, guard.path, guard.reasons.get(dim, "")
        return (
            f"{name} has been compiled {OFTEN} times, since dimension {dim} of {path}, "
            f"{guard.shape[dim]} in this call, differs between the calls "
            f"({', '.join(map(str, sizes))}), and the trace has its size as a constant"
            + (f" ({reason})" if reason else "")
            + f": pad {path} to a few sizes, or keep the model from making a constant of it; "
            "print(pipe.compilations) says why each compilation was made"
        )

    def _tell_of_attributes(self, before: Premises) -> None:
        """Warn that changes of an attribute of the model have led to OFTEN compilations. ``before``
        is the state of the attributes in the compilation before this one."""
        paths = paths_of(self.model)
        for module, attribute in before.broken()[:1]:
            path = f"{paths[module]}.{attribute}".removeprefix(".")
            value = reprlib.repr(getattr(module, attribute, None))
            warn(
                f"{type(self.model).__name__} has been compiled {OFTEN} times, since {path}, an "
                "attribute that is neither a parameter nor a buffer, differs between the calls "
                f"({value} in this one): make it a tensor, as a buffer or an argument",
            )
            return
        if difference := before.global_values.difference():
            warn(
                f"{type(self.model).__name__} has been compiled {OFTEN} times, since what its "
                f"forward reads differs between the calls ({difference}): give it as an argument, "
                "or keep it in a buffer whose values change in place",
            )
            return
        for path in before.written(paths)[:1]:
            warn(
                f"{type(self.model).__name__} has been compiled {OFTEN} times, since {path}, a "
                "tensor from which its forward computes a constant of the graph, is written to "
                "between the calls: make it a buffer, which a graph reads in every call",
            )


def _graphs(*modes: Mode) -> list[fx.Graph]:
    return [mode.model_graph.graph for mode in modes]


def _without_tensors(path: str, tensors: Iterable[str]) -> str:
    """The path of the largest part of an argument that leads to a constant, such as the list that
    it is in, and has no tensors.

    Args:
        path: that of the constant, such as ``batch.names[1]``.
        tensors: the paths of all tensors of the call.
    """
    ends = [match.start() for match in re.finditer(r"[.\[]", path)]
    for part in (path[:end] for end in ends):
        if not any(f"{tensor}.".startswith((f"{part}.", f"{part}[")) for tensor in tensors):
            return part
    return path
