"""What a forward changes on modules, beside tensors: numbers, lists, entries of dicts.

::

    self.t += 1                                  a graph has no such line: it would go on with
    return y * min(1, self.t / 100)              the t of the first call for ever

The model is run with the values that later calls find in the changed attributes. If that makes a
difference to the model's outputs or buffers, the module that has the attribute is kept whole: its
forward really runs, once for each micro-batch and in their order. The model itself cannot be kept
whole, so it is refused. If it makes no difference, a pipeline leaves the attribute unchanged, and a
warning says so.

A mode is such an attribute, too. It is one of the module that is in train or eval mode, but another
one, around it, sets it: ``self.norm.eval()``. So that other one is kept whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import TraceError, is_the_models
from fxpipe.ir.hooks import HOOKS
from fxpipe.ir.log import warn
from fxpipe.ir.source import is_a_models
from fxpipe.ir.structure import leaves
from fxpipe.runtime.random import HostRandomState
from fxpipe.runtime.state import STATEFUL, Attribute, State
from fxpipe.trace.checks import Reference, difference
from fxpipe.trace.derived import Derived
from fxpipe.trace.errors import Refused, source_line
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.isolation import MODE, parameters_put_back, untouched

Unit = tuple[nn.Module, str]
"""A module, and the name of an attribute."""

Setter = Callable[[], None]
"""A function that sets one attribute of a module to another value."""

_ROWS = -1, 0  # the rows of which the inputs of the calls consist that follow the example's
_FAR = 1000  # how many calls ahead an attribute that may count calls is tried


def kept_whole(
    example: Example, reference: Reference
) -> tuple[dict[nn.Module, str], Sequence[Unit]]:
    """The modules to keep whole, since what they give depends on a state that they change; and the
    attributes that other modules change, on which nothing depends (:func:`tell`).

    Raises TraceError if the model itself is to be kept whole.
    """
    drawing = _drawing(example, reference.tensors) if reference.result.draws else {}
    modes = reference.result.modes
    changed = [*reference.result.changed, *modes]
    if not changed:
        STATEFUL.update(part for module in drawing for part in module.modules())
        return drawing, ()
    model, tensors = example.model, reference.tensors
    later, lasting, kept = _later_states(example, tensors, changed)
    # What has once been found to matter does so: with the state of now, it may be hard to see.
    known = [unit for unit in changed if unit[0] in STATEFUL]
    found = _that_matter(example, reference, list(changed), later)
    matters = dict.fromkeys([*known, *found, *kept])
    names = {module: name for name, module in model.named_modules()}
    whole = dict(drawing)
    for module, name in matters:
        path = names[module].rpartition(".")[0] if name == MODE else names[module]
        owner = _with_a_forward(model, path)
        if owner is model:
            where = _where(example, tensors, (module, name))
            path = f"{names[module]}.{name}".removeprefix(".")
            if name == MODE:
                raise TraceError(
                    f"{type(model).__name__} changes {path} in its forward{where}, and what it "
                    "gives depends on it: a graph would compute in one mode for ever. Call train() "
                    "and eval() outside of the forward; or move this into a module of its own, "
                    "which is then kept whole"
                )
            raise TraceError(
                f"{type(model).__name__} changes {path} in its forward{where}, and what it gives "
                "depends on it: a graph would have its first value for ever. Keep a number in a "
                f"buffer, self.register_buffer({name!r}, torch.tensor(...)), and write to it in "
                "place; take what belongs to the rows, such as a hidden state, as an argument, and "
                "return it; or move this into a module of its own, which is then kept whole"
            )
        whole[owner] = names[owner]
    whole = {
        m: name
        for m, name in whole.items()
        if not any(name.startswith(f"{other}.") for other in whole.values())
    }
    STATEFUL.update(part for module in whole for part in module.modules())
    return whole, [*lasting, *modes]


def tell(
    example: Example, reference: Reference, changed: Sequence[Unit], graph_module: nn.Module
) -> None:
    """Warn of attributes that the model changes, and a pipeline does not: those of modules whose
    code the graph does not call. Of modules in modules that are all put into another mode, the
    outermost is told of."""
    called = set(graph_module.modules())
    names = {module: name for name, module in example.model.named_modules()}
    alike: dict[tuple[type, str], list[nn.Module]] = {}
    for module, name in changed:
        path = names[module]
        setting = _around(example.model, path) if name == MODE else [module]
        if called.isdisjoint(setting) and not (name == MODE and (setting[0], name) in changed):
            alike.setdefault((type(module), name), []).append(module)
    for (_, name), owners in alike.items():
        _tell(example, reference.tensors, owners, name, names[owners[0]])


def _around(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules around one of a model, the innermost first; for the model, itself."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(model.get_submodule(path))
    return found or [model]


def tell_of_what_is_outside(example: Example, reference: Reference) -> None:
    """Warn of tensors that every call of the model puts into global variables, and of variables
    outside of modules that it assigns to. What only the first call puts there is a table that later
    calls use."""
    if not (reference.result.outside or reference.result.assigned):
        return
    with untouched(example.model), torch.no_grad(), parameters_put_back(example.model):
        example.call([tensor.clone() for tensor in reference.tensors])
        with untouched(example.model) as since:
            example.call([tensor.clone() for tensor in reference.tensors])
            names, assigned = since.changed_outside(), since.assigned()
    does = [f"puts tensors into {name}" for name in names]
    for each in (*does, *(f"assigns to {variable.said}" for variable in assigned)):
        warn(
            f"{type(example.model).__name__} {each} in its forward; a pipeline does not, but for "
            "modules that are kept whole, so that there is after a call what was there before. If "
            "you read it, in the loss say, let the forward return it"
        )


def refuse_assigned_variables(example: Example, reference: Reference) -> None:
    """Raise TraceError if what the model gives depends on a variable outside of modules that it
    assigns to: later calls find another value there, and a graph has the first one."""
    model, variables = example.model, reference.result.assigned
    if not variables:
        return
    later: list[list[Any]] = []
    with untouched(model), torch.no_grad(), parameters_put_back(model):
        for row in _ROWS:
            example.call(rows_alike(example, reference.tensors, row))
            later.append([each.get() for each in variables])
    counted = [
        (each, number)
        for each, number, other in zip(variables, *later, strict=True)
        if type(number) in (int, float) and number != other
    ]
    states = [[*zip(variables, values, strict=True)] for values in later]
    states += [[(each, number + more) for each, number in counted] for more in (1, _FAR)]
    each_as_setters = ([partial(each.set, value) for each, value in state] for state in states)
    if any(differs(example, reference, setters) for setters in each_as_setters if setters):
        said = " and ".join(each.said for each in variables)
        raise TraceError(
            f"{type(model).__name__} assigns to {said} in its forward, and what it gives depends "
            "on that: a graph would have the first value for ever. Keep a number in a buffer, "
            'self.register_buffer("calls", torch.tensor(0)), and write to it in place; take what '
            "belongs to the rows, such as a hidden state, as an argument, and return it; or keep "
            "it in an attribute of a module within the model, which is then kept whole"
        )


def _drawing(example: Example, tensors: list[Tensor]) -> dict[nn.Module, str]:
    """The modules whose forward draws from Python's or NumPy's random number generator, with their
    paths: a graph would have the numbers that were drawn while it was traced for ever.

    Raises TraceError if the model itself is one of them.
    """
    model, found = example.model, dict[nn.Module, str]()
    names = {module: name for name, module in model.named_modules()}
    before: list[HostRandomState] = []

    def enter(module: nn.Module, args: Any) -> None:
        note()
        running.append(module)
        before.append(HostRandomState())

    def note() -> None:
        """Note the innermost module that is running if it has drawn since it began, or since the
        last of its parts has ended."""
        if running and before[-1].has_changed:
            found[running[-1]] = names[running[-1]]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note()
        running.pop()
        before.pop()
        if before:
            before[-1] = HostRandomState()

    running: list[nn.Module] = []
    with untouched(model), torch.no_grad(), parameters_put_back(model):
        for module in names:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
        example.call([tensor.clone() for tensor in tensors])
    if model in found:
        raise TraceError(
            f"{type(model).__name__} draws random numbers with Python's random, or with NumPy, in "
            "its forward: a graph would have the first ones for ever. Draw them with torch; or "
            "draw them in a module of its own, which is then kept whole"
        )
    return found


@dataclass(frozen=True)
class _Later:
    """The state in which a later call finds the model: the attributes that calls change, and the
    hooks that they register. Hooks are always set together with attributes, since one of these may
    be a flag that says whether the hooks are registered."""

    attributes: dict[Unit, Setter]
    hooks: list[Setter]

    def set(self, *units: Unit) -> list[Setter]:
        """Functions that put the hooks and some of the attributes into this state."""
        return [self.attributes[unit] for unit in units] + self.hooks


def _later_states(
    example: Example, tensors: list[Tensor], changed: Iterable[Unit]
) -> tuple[list[_Later], list[Unit], list[Unit]]:
    """The states in which the second and the third call find the model; those of the ``changed``
    attributes that the second call changes, too; and those that keep what the first call has
    computed from parameters, which an optimizer changes (:mod:`fxpipe.trace.derived`).

    In the first of these calls every row is the example's last row, in the second its first row: an
    attribute that a call computes from its input and keeps then differs from the example's, and
    from call to call.
    """
    later: list[_Later] = []
    lasting: list[Unit] = []
    of_parameters: list[Unit] = []
    modules = list(example.model.modules())
    with untouched(example.model), torch.no_grad():
        for row in _ROWS:
            before = State(example.model.modules())
            with (
                parameters_put_back(example.model),
                Derived(example.trained.values()) as derived,
            ):
                example.call(rows_alike(example, tensors, row))
            lasting = before.changed()
            if not later:
                of_parameters = [u for u in changed if any(map(derived.has, _tensors_in(*u)))]
            hooks: list[Setter] = [
                partial(some.update, dict(some)) for m in modules for some in _hooks(m) if some
            ]
            attributes = {unit: Attribute(*unit).set for unit in changed}
            later.append(_Later(attributes, hooks))
    kept = [unit for unit in of_parameters if unit not in lasting]
    return later, [unit for unit in lasting if unit in changed], kept


def _tensors_in(module: nn.Module, name: str) -> list[Tensor]:
    """The tensors in an attribute of a module, also in objects that are in it."""
    return [part for _, part in leaves(vars(module).get(name)) if isinstance(part, Tensor)]


def rows_alike(example: Example, tensors: Sequence[Tensor], row: int) -> list[Tensor]:
    """Inputs of which every row is this one of the example."""
    return [
        tensor.clone() if dim is None else tensor.narrow(dim, row, 1).expand_as(tensor).clone()
        for tensor, dim in zip(tensors, example.batch_dims, strict=True)
    ]


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    """A module's dictionaries of hooks, one of each kind."""
    return [vars(module)[kind] for kind in HOOKS if kind in vars(module)]


def _that_matter(
    example: Example, reference: Reference, changed: list[Unit], later: list[_Later]
) -> list[Unit]:
    """The changed attributes on which the model's outputs or buffers depend.

    All attributes are changed together first, as later calls find them. Only if that makes a
    difference is each tried alone: to change one of two flags that belong together is a state in
    which no call finds the model.
    """
    together = any(differs(example, reference, state.set(*changed)) for state in later)
    alone = [
        unit
        for unit in changed
        if (together and any(differs(example, reference, state.set(unit)) for state in later))
        or any(differs(example, reference, setters) for setters in _far(unit))
    ]
    return changed if together and not alone else alone


def _far(unit: Unit) -> list[list[Setter]]:
    """If an attribute is a number, the setters that add one to it, and a large number, as if it
    counted calls; else none."""
    module, name = unit
    number: Any = vars(module).get(name)
    if type(number) not in (int, float):
        return []
    return [[partial(vars(module).update, {name: number + n})] for n in (1, _FAR)]


def differs(example: Example, reference: Reference, setters: Sequence[Setter]) -> bool:
    """Whether the model gives something else than the reference, or fails, once attributes have
    been set."""
    try:
        with untouched(example.model):
            for setter in setters:
                setter()
            result = example.run(reference.tensors, watched=True)
    except Exception as error:
        if not is_the_models(error):
            raise
        return True  # the model does not take such a value, so what it gives depends on it
    expected = reference.result
    return any(
        difference(one, other, 0.0)
        for one, other in ((expected.output, result.output), (expected.buffers, result.buffers))
    )


def _with_a_forward(model: nn.Module, name: str) -> nn.Module:
    """The innermost module at a path, or around it, that can be called."""
    module = model.get_submodule(name)
    while isinstance(module, nn.ModuleList | nn.ModuleDict):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _tell(
    example: Example, tensors: list[Tensor], owners: list[nn.Module], name: str, path: str
) -> None:
    others = f", as in {len(owners) - 1} more modules" if len(owners) > 1 else ""
    where = _where(example, tensors, (owners[0], name))
    kind, path = type(example.model).__name__, f"{path}.{name}".removeprefix(".")
    warn(
        f"{kind} sets {path} in its forward{where}{others}; a pipeline does not, so that {path} is "
        "after a call what it was before. No output of this call depends on that; if you read it "
        f"after a call, or the model does in another mode, {_instead(owners[0], name)}",
    )


def _instead(owner: nn.Module, name: str) -> str:
    """What to do in place of reading an attribute of a module that a call sets. Weights that a hook
    of ``torch.nn.utils`` computes (``spectral_norm``) are no output of a forward."""
    for hook in owner._forward_pre_hooks.values():
        made_by = type(hook).__module__.rpartition(".")
        if made_by[0] == nn.utils.__name__ and getattr(hook, "name", None) == name:
            known = f"{nn.utils.__name__}.parametrizations.{made_by[2]}"
            return f"use {known}, which computes it whenever it is read"
    if name == MODE:
        return "call train() and eval() outside of the forward"
    return "let the forward return it, and read that"


def _where(example: Example, tensors: list[Tensor], unit: Unit) -> str:
    """The line of the model that changes an attribute: its forward is run line by line.

    That is the line at which the frame stands in which the change is seen first, and not the line
    that ran last: that may be in a function that the line has called, or that the garbage collector
    has called meanwhile. ::

        self.t = following(self.t)        the last line to run is in following, and changes nothing
    """
    reached: dict[FrameType, tuple[str, int]] = {}
    found: list[tuple[str, int]] = []
    attribute = Attribute(*unit)

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if not is_a_models(frame) or found:
            return None
        if not attribute.is_now():
            changing: FrameType | None = frame
            while changing is not None and changing not in reached:  # it has only just been called
                changing = changing.f_back
            if changing is not None:
                found.append(reached[changing])
        if event == "line":
            reached[frame] = frame.f_code.co_filename, frame.f_lineno
        return step

    outer = sys.gettrace()
    with untouched(example.model), torch.no_grad(), parameters_put_back(example.model):
        sys.settrace(step)
        try:
            example.call([tensor.clone() for tensor in tensors])
        finally:
            sys.settrace(outer)
    return f" (at {source_line(*found[0])})" if found else ""


def compare(example: Example, reference: Reference, traced: Traced, tolerance: float) -> None:
    """Raise ``Refused`` unless two calls of the graph, one after the other, give the outputs of two
    calls of the model, and leave the same state behind."""
    outputs = [list(_two_calls(example, reference, each)) for each in (None, traced)]
    for one, other in zip(*outputs, strict=True):
        found = difference(one, other, tolerance)
        if found:
            raise Refused(f"its graph differs in a second call: {found}")


def _two_calls(example: Example, reference: Reference, traced: Traced | None) -> Iterator[Any]:
    with untouched(example.model), torch.no_grad(), parameters_put_back(example.model):
        for _ in range(2):
            output = example.call([tensor.clone() for tensor in reference.tensors], traced)
            yield pytree.tree_map_only(Tensor, Tensor.clone, output)
        yield {
            f"{name}.{key}": value
            for name, module in example.model.named_modules()
            if module in STATEFUL
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        }
