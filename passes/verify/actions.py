"""The promises of the actions of a training step.

::

    forward ─┬─ results ─ ... ─ loss ─ loss_backward ─ ... ─ gradients of the results ─┐
             └─ tape ──────────────────────────── (replay) ─────────────────────────── backward
                                                                                           │
                                                              gradients of parameters ─ optimize

1. Every tape is used up, once: by a backward, or by a backward_input and then a weight_grad. One
   that was recorded without activations is replayed ahead of that, and no other one is. One
   whose activations move to the host is moved once, and reloaded once ahead of the backward.
2. A backward is given the gradients of just those values that its forward has given, from the
   stages that these have gone to, and comes after the loss's backward.
3. A parameter is stepped once, in its home, after all its gradients: those of all micro-batches, of
   all replicas of the parameter, and of all replicas of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE, attribute
from passes.common.modes import OFFLOAD, SELECTIVE
from passes.to_step.forward import DEFERRED
from passes.verify.clocks import Event
from passes.verify.errors import VerifyError
from passes.verify.links import bring
from passes.verify.parts import check_parts, check_taken, use_parameters
from passes.verify.record import Recording
from passes.verify.values import Known, KnownTape, NotKnown, leaves, mapped
from passes.verify.visit import GRADIENT, PARAMETER, Visit, rule, said


@rule(ops.forward)
def _forward(visit: Visit, node: fx.Node) -> Any:
    module, args, passed, single, checkpoint = node.args
    assert isinstance(module, fx.Node)
    path = str(module.target)
    stage = visit.stage(path, node)
    if stage.gives and single != (len(stage.gives) == 1):
        raise VerifyError(f"the stage gives {len(stage.gives)} results", node)
    given = visit.ready(node, visit.given(args), visit.here())
    if any(i >= len(given) for i in passed):  # type: ignore[union-attr, operator]
        raise VerifyError("it passes on an argument that it does not have", node)
    check_taken(visit, node, stage, given)
    visit.step.note_action(node)
    visit.given_by |= dict.fromkeys(stage.gives, node)
    giver = path.removesuffix(DEFERRED)
    visit.step.stages.setdefault(giver, node)
    for value in given:
        if isinstance(value, Known) and value.maker in visit.step.replicas:
            _check_stage(value.maker, node)
    visit.alike(("a stage is given", giver), node, (given, passed))
    event = visit.event(node, given)
    use_parameters(visit, stage, event)
    visit.effects.write(("state", giver), event)
    own = stage.gives or ((path,) if single else ())
    names = (*own, *(_name_of(given[i]) for i in passed))  # type: ignore[union-attr]
    results = tuple(
        Known(name, node.meta.get(MICROBATCH), visit.here(), event.clock, node, giver)
        for name in names
    )
    visit.step.recordings[node] = Recording(node, stage, giver, given, results, checkpoint)
    return results, KnownTape(node)


def _check_stage(node: fx.Node, other: fx.Node) -> None:
    """Check that a node is noted at the stage of another node, whose work it prepares or ends."""
    stage, own = node.meta.get(STAGE), other.meta.get(STAGE)
    if stage != own:
        raise VerifyError(f"it belongs to stage {own}, and is noted at stage {stage}", node, other)


def _name_of(value: Any) -> Any:
    return value.what if isinstance(value, Known) else value


@rule(ops.loss)
def _loss(visit: Visit, node: fx.Node) -> Any:
    _, output, target, number, tapes = node.args
    microbatch = node.meta.get(MICROBATCH)
    if number != microbatch:
        raise VerifyError(f"it is noted to be the loss of micro-batch {number}", node)
    given = visit.ready(node, visit.given(output), visit.here())
    targets = visit.ready(node, visit.given(target), visit.here())
    visit.alike("the loss is given", node, (given, targets))
    visit.take(given)
    event = visit.event(node, (given, targets))
    recording = Recording(node, None, "loss", given)
    visit.step.recordings[node] = recording
    stages: list[Any] = []
    for tape in visit.given(tapes):
        if isinstance(tape, KnownTape):
            own = visit.step.recordings[tape.maker]
            if own.node.meta.get(MICROBATCH) != microbatch:
                raise VerifyError("it is given a tape of another micro-batch", node, own.node)
            own.loss = recording
            stages.append(own.giver)
    if len(set(stages)) != len(stages):
        raise VerifyError("it is given the tape of one stage twice", node)
    value = Known("loss", microbatch, visit.here(), event.clock, node)
    return value, KnownTape(node)


@rule(ops.loss_backward)
def _loss_backward(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    if recording.stage is not None:
        raise VerifyError("it begins the backward of a loss, and is given a stage's tape", node)
    weight = visit.given(node.args[1])
    if isinstance(weight, Known) and weight.microbatch != node.meta.get(MICROBATCH):
        raise VerifyError(f"it is given {said(weight)}", node, weight.maker)
    recording.backward = visit.event(node)
    return _gradients(visit, node, recording)


def _gradients(visit: Visit, node: fx.Node, recording: Recording) -> Any:
    """What a backward gives: the gradient of each argument."""
    event = visit.events[node]

    def gradient(of: Any) -> Any:
        if not isinstance(of, Known):
            return None
        what = GRADIENT, of.what, of.giver
        return Known(what, of.microbatch, visit.here(), event.clock, node)

    return mapped(gradient, recording.given)


def _taken(visit: Visit, node: fx.Node) -> Recording:
    """The recording whose tape a node uses, in the lane and the cell where it was recorded."""
    tape = visit.given(node.args[0])
    if not isinstance(tape, KnownTape):
        raise VerifyError("it has to be given a tape", node)
    recording = visit.step.recordings[tape.maker]
    keys = STAGE, MICROBATCH
    if any(recording.node.meta.get(key) != node.meta.get(key) for key in keys):
        raise VerifyError("it is given the tape of another cell", node, recording.node)
    return recording


@rule(ops.replay)
def _replay(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    if recording.checkpoint not in (True, SELECTIVE):
        raise VerifyError("it replays a forward that has kept its activations", node)
    _note_replay(visit, recording, node)
    assert recording.stage is not None
    use_parameters(visit, recording.stage, visit.event(node))


def _note_replay(visit: Visit, recording: Recording, node: fx.Node) -> None:
    if recording.replay is not None or recording.backward is not None:
        earlier = recording.replay or (recording.backward.node if recording.backward else None)
        raise VerifyError(
            "the activations have been made again or brought back already, or need not be",
            node,
            earlier,
        )
    visit.step.note_action(node)
    recording.replay = node


@rule(ops.offload)
def _offload(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    if recording.checkpoint != OFFLOAD:
        raise VerifyError("it moves activations that are not recorded for that", node)
    if recording.offload is not None or recording.backward is not None:
        earlier = recording.offload or (recording.backward.node if recording.backward else None)
        raise VerifyError("the activations have moved already, or need not move", node, earlier)
    recording.offload = node


@rule(ops.reload)
def _reload(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    if recording.offload is None:
        raise VerifyError("it brings back activations that have not moved", node, recording.node)
    _note_replay(visit, recording, node)


@rule(ops.backward, ops.backward_input)
def _backward(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    visit.step.note_action(node)
    _check_tape(recording, node)
    grads = visit.ready(node, visit.given(node.args[1]), visit.here())
    _check_gradients(node, recording, grads)
    visit.alike(("a backward is given", recording.giver), node, grads)
    event = visit.event(node, (grads, visit.given(node.args[2:])))
    if recording.loss is not None:
        _check_after_loss(node, recording.loss, event)
    recording.backward = event
    _add_gradients(visit, recording, event)
    return _gradients(visit, node, recording)


def _check_tape(recording: Recording, node: fx.Node) -> None:
    """Check that a tape is used for the first time, and has been replayed if it needs to be."""
    if recording.stage is None:
        raise VerifyError("it runs the backward of a stage, and is given a loss's tape", node)
    if recording.backward is not None:
        raise VerifyError("the tape has been used already", node, recording.backward.node)
    if recording.checkpoint and recording.replay is None:
        is_away = recording.checkpoint == OFFLOAD
        raise VerifyError(
            f"the forward has kept no activations{' on the device' * is_away}",
            node,
            recording.node,
            "a reload" if is_away else "a replay of the forward",
        )


def _check_gradients(node: fx.Node, recording: Recording, grads: Any) -> None:
    if isinstance(grads, NotKnown):
        return
    for grad, result in zip(grads, recording.results, strict=False):
        own = GRADIENT, result.what, result.giver
        if isinstance(grad, Known) and grad.what != own:
            raise VerifyError(
                f"it is given {_words(grad.what)} where the gradient of {result.what} should stand",
                node,
                grad.maker,
            )


def _words(what: Any) -> str:
    is_gradient = isinstance(what, tuple) and what[:1] == (GRADIENT,)
    return f"the gradient of {what[1]}" if is_gradient else str(what)


def _check_after_loss(node: fx.Node, loss: Recording, event: Event) -> None:
    if loss.backward is None or not loss.backward.is_before(event):
        raise VerifyError(
            "the loss may have gradients for parameters of this stage, so that its backward comes "
            "first",
            node,
            loss.node,
            "the loss's backward ahead of this one",
        )


def _add_gradients(visit: Visit, recording: Recording, by: Event) -> None:
    """A backward adds to the gradients of the parameters that the stage uses, and of replicas."""
    assert recording.stage is not None
    use_parameters(visit, recording.stage, by)
    _add_to(visit, recording.stage.parameters, by)
    for value in leaves(recording.given):
        if isinstance(value, Known) and value.maker in visit.step.replicas:
            taken = visit.step.replicas[value.maker]
            if taken:
                raise VerifyError(
                    "the gradient has been taken before it is done", by.node, taken[0]
                )
            visit.effects.names[(GRADIENT, value.maker.name)] = f"gradient of {value.maker}"
            visit.effects.write((GRADIENT, value.maker.name), by)


def _add_to(visit: Visit, parameters: dict[int, str], by: Event) -> None:
    for number, name in parameters.items():
        for done, what in ((visit.step.optimized, "stepped"), (visit.step.reduced, "summed up")):
            if number in done:
                raise VerifyError(
                    f"the parameter {name} has been {what} before its gradient is done",
                    by.node,
                    done[number],
                )
        visit.effects.write((GRADIENT, number), by)


@rule(ops.weight_grad)
def _weight_grad(visit: Visit, node: fx.Node) -> Any:
    recording = _taken(visit, node)
    visit.step.note_action(node)
    before = recording.backward
    if before is None or before.node.target is not ops.backward_input or recording.weight_grad:
        raise VerifyError(
            "the second half of a backward comes once, after the first half",
            node,
            recording.weight_grad or recording.node,
        )
    recording.weight_grad = node
    _add_gradients(visit, recording, visit.event(node))


@rule(ops.added)
def _added(visit: Visit, node: fx.Node) -> Any:
    first, second = visit.ready(node, visit.given(node.args), visit.here())
    if isinstance(first, Known) and isinstance(second, Known):
        if first.what != second.what:
            raise VerifyError(
                f"it adds {_words(first.what)} and {_words(second.what)}", node, second.maker
            )
        return first.at(first.place, visit.event(node, (first, second)).clock, node)
    return first if isinstance(first, Known) else second


# ----------------------------------------------------------------------------- replicas, optimizers


@rule(ops.replicate)
def _replicate(visit: Visit, node: fx.Node) -> Any:
    if node.meta.get(MICROBATCH):
        raise VerifyError("a replica is made once, ahead of all micro-batches", node)
    visit.step.replicas[node] = []
    return bring(visit, node)


@rule(ops.gathered)
def _gathered(visit: Visit, node: fx.Node) -> Any:
    (replica,) = visit.ready(node, visit.given(node.args), visit.here())
    if not isinstance(replica, Known) or replica.maker not in visit.step.replicas:
        raise VerifyError("it takes the gradient of what is no replica", node)
    _check_stage(node, replica.maker)
    visit.step.replicas[replica.maker].append(node)
    visit.exchange.taken_home[node] = []
    event = visit.event(node)
    visit.effects.read((GRADIENT, replica.maker.name), event)
    _check_last(visit, node)
    return Known((GRADIENT, replica.what, node.name), None, visit.here(), event.clock, node)


def _check_last(visit: Visit, node: fx.Node) -> None:
    """Check that a node which comes when a stage is done is noted with the stage's last action."""
    last = visit.step.last_action.get(node.meta.get(STAGE))
    if last is not None and last.meta.get(MICROBATCH) != node.meta.get(MICROBATCH):
        raise VerifyError("it comes when all actions of its stage are done", node, last)


@rule(ops.accumulate)
def _accumulate(visit: Visit, node: fx.Node) -> Any:
    parameter = node.args[0]
    assert isinstance(parameter, fx.Node)
    path, number = str(parameter.target), id(attribute(visit.gm, str(parameter.target)))
    (grad,) = visit.ready(node, (visit.given(node.args[1]),), visit.here())
    if isinstance(grad, Known):
        _, of, taken = grad.what if isinstance(grad.what, tuple) else (None, None, None)
        if of != ("replica", path):
            raise VerifyError(f"it adds {_words(grad.what)} to that of {path}", node, grad.maker)
        for own, users in visit.exchange.taken_home.items():
            if own.name == taken:
                users.append(node)
    _check_home(visit, node, number, path)
    _check_last(visit, node)
    _add_to(visit, {number: path}, visit.event(node, (grad,)))


def _check_home(visit: Visit, node: fx.Node, parameter: int, name: str) -> None:
    home = visit.homes.get(parameter)
    if home is not None and (home.lane, home.stage) != (visit.lane, node.meta.get(STAGE)):
        raise VerifyError(
            f"the parameter {name} lives in stage {home.stage}, in lane {home.lane}", node
        )


def _owned(visit: Visit, node: fx.Node) -> dict[int, str]:
    """The parameters that a node steps, or sums up: those of a stage, less those of others."""
    module, others = node.args[1:3]
    assert isinstance(module, fx.Node)
    stage = attribute(visit.gm, str(module.target))
    assert isinstance(stage, nn.Module)
    known = dict(stage.named_parameters())
    unknown = [name for name in others if name not in known]  # type: ignore[union-attr]
    if unknown:
        raise VerifyError(f"the stage has no parameter {unknown[0]} to leave to another one", node)
    return {id(p): name for name, p in known.items() if name not in others}  # type: ignore[operator]


@rule(ops.optimize)
def _optimize(visit: Visit, node: fx.Node) -> Any:
    event = visit.event(node)
    _check_last(visit, node)
    module = node.args[1]
    assert isinstance(module, fx.Node)
    visit.step.stepped_stages.add(path := str(module.target))
    if path in visit.step.stages:
        _check_stage(node, visit.step.stages[path])
    later: Any = node.args[3] if len(node.args) > 3 else ()
    for number, name in _owned(visit, node).items():
        _check_home(visit, node, number, name)
        if number in visit.step.optimized:
            earlier = visit.step.optimized[number]
            raise VerifyError(f"the parameter {name} is stepped twice", node, earlier)
        if name not in later:
            if number in visit.in_memory_of_others:
                raise VerifyError(
                    f"the parameter {name} is stepped while another stage may read its memory, in "
                    "which it has another tensor",
                    node,
                )
            visit.effects.read((GRADIENT, number), event)
            visit.effects.write((PARAMETER, number), event)
        visit.step.optimized[number] = node
        if visit.step.reduced and (number not in visit.step.reduced or not visit.step.sums):
            raise VerifyError(
                f"the gradient of {name} has not been summed over replicas", node, None
            )


@rule(ops.reduce)
def _reduce(visit: Visit, node: fx.Node) -> Any:
    event = visit.event(node)
    for number, name in _owned(visit, node).items():
        if number in visit.step.reduced:
            earlier = visit.step.reduced[number]
            raise VerifyError(f"the gradient of {name} is summed up twice", node, earlier)
        visit.effects.write((GRADIENT, number), event)
        visit.step.reduced[number] = node


@rule(ops.reduced)
def _reduced(visit: Visit, node: fx.Node) -> Any:
    visit.step.sums.append(node)
    visit.event(node)


@rule(ops.average)
def _average(visit: Visit, node: fx.Node) -> Any:
    losses = visit.ready(node, visit.given(node.args[0]), visit.here())
    check_parts(visit, node, losses)
    return Known("loss", None, visit.here(), visit.event(node, losses).clock, node)


@rule(ops.total)
def _total(visit: Visit, node: fx.Node) -> Any:
    loss = visit.given(node.args[1])
    visit.event(node, (loss,))
    return loss


# ------------------------------------------------------------------------------------------ the end


def check_actions(visit: Visit) -> None:
    """Check that nothing is left over at the end of a step: no tape that has not been used, no
    gradient that has not been added, no parameter that has not been stepped."""
    for recording in visit.step.recordings.values():
        if recording.backward is None:
            raise VerifyError(
                "its tape is never used: there is no backward of this cell", recording.node
            )
        first = recording.backward.node
        if first.target is ops.backward_input and recording.weight_grad is None:
            raise VerifyError("the second half of this backward never comes", first)
    counted = [visit.step.replicas]
    if not visit.is_one_of_several:  # another rank may add the gradient
        counted.append(visit.exchange.taken_home)
    for taken in counted:
        for node, users in taken.items():
            if len(users) != 1:
                raise VerifyError(
                    f"the gradient of a replica goes home once, and not {len(users)} times", node
                )
    _check_all_are_stepped(visit)


def _check_all_are_stepped(visit: Visit) -> None:
    for node, recording in visit.step.recordings.items():
        if recording.stage is not None and recording.giver not in visit.step.stepped_stages:
            raise VerifyError("the optimizer never steps the parameters of this stage", node)
    missing = [number for number in visit.homes if number not in visit.step.optimized]
    for node in _first_uses(visit, missing):
        name = visit.homes[missing[0]].name
        raise VerifyError(f"the optimizer never steps the parameter {name} of this stage", node)


def _first_uses(visit: Visit, parameters: Iterable[int]) -> Iterator[fx.Node]:
    for number in parameters:
        for node, recording in visit.step.recordings.items():
            if recording.stage is not None and number in recording.stage.parameters:
                yield node
