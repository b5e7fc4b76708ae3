"""What the processes of a pool do in tests, and one process does for comparison."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from fxpipe import ops
from fxpipe.ir.graph import STAGE
from fxpipe.runtime.ranks import transport
from fxpipe.runtime.ranks.alarm import Alarm
from fxpipe.runtime.ranks.errors import RankError
from fxpipe.runtime.ranks.transport import COMMUNICATORS
from fxpipe.runtime.ranks.watch import Watch
from fxpipe.schedule import placement_of
from passes import Tied, default_chain
from tests.zoo import mean_loss, same

Make = Callable[[], nn.Module]
Where = dist.ProcessGroup | int
"""The ranks of a group, or so many lanes of this process."""


@dataclass
class Call:
    """The arguments of a step: by place, by name, and the target."""

    args: tuple[Any, ...] = ()
    target: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """What a process has after training."""

    losses: list[Tensor]
    grads: dict[str, Tensor]  # of the last step
    state: dict[str, Tensor]
    output: Any  # in eval mode, for the last call; None without one


def made(make: Make) -> nn.Module:
    """The model, with the same parameters in every process."""
    torch.manual_seed(0)
    return make()


def compiled(where: Where, make: Make, loss_fn: Any, **options: Any) -> fxpipe.Pipeline:
    """The model as a pipeline of ranks, or of lanes that are as many places, so that a tied weight
    goes to another lane once in a step, as it does to another rank."""
    model = made(make)
    if not isinstance(where, int):
        return fxpipe.compile(model, where, loss_fn=loss_fn, **options)
    schedule = options.get("schedule", "gpipe")
    places = placement_of(schedule, where, options.get("stages"))
    tied = Tied(("cpu",) * len(places), places)
    chain = default_chain().replace("tied", tied)
    return fxpipe.compile(model, ["cpu"] * where, loss_fn=loss_fn, passes=chain, **options)


def train_all_sharing(*args: Any) -> list[Trained]:
    """:func:`train_all`, where a rank has one communicator for a single edge, and all other edges
    share one."""
    os.environ[COMMUNICATORS] = "1"
    try:
        return train_all(*args)
    finally:
        del os.environ[COMMUNICATORS]


@contextmanager
def rendezvous(is_on: bool = True):
    """In this process every transmit waits for its receive, in runs that begin in this context."""
    before = os.environ.get("FXPIPE_RENDEZVOUS", "0")
    os.environ["FXPIPE_RENDEZVOUS"] = "1" if is_on else before
    try:
        yield
    finally:
        os.environ["FXPIPE_RENDEZVOUS"] = before


def train(
    where: Where,
    make: Make,
    calls: Sequence[Call],
    loss_fn: Any = mean_loss,
    in_step: bool = False,
    is_evaluated: bool = True,
    is_meeting: bool = False,
    **options: Any,
) -> Trained:
    """Make a step for each call, with an optimizer, and one call in eval mode.

    Args:
        in_step: whether the optimizer is given to the step.
        is_evaluated: whether there is a call in eval mode, for which the model is compiled again.
        is_meeting: whether every transmit waits for its receive, in the last step and in eval mode.
    """
    example = {"example_inputs": calls[0].args, "example_kwargs": calls[0].kwargs}
    with compiled(where, make, loss_fn, **example, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        losses, grads = [], {}
        for call in calls:
            optimizer.zero_grad()
            torch.manual_seed(7)
            how = {"optimizer": optimizer if in_step else None, **call.kwargs}
            with rendezvous(is_meeting and call is calls[-1]):
                losses.append(pipe.step(*call.args, target=call.target, **how))
            grads = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
            if not in_step:
                optimizer.step()
        output = None
        if is_evaluated:
            pipe.eval()
            with torch.no_grad(), rendezvous(is_meeting):
                output = pipe(*calls[-1].args, **calls[-1].kwargs)
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
    return Trained(losses, grads, state, output)


def train_all(
    group: Where, make: Make, calls: Sequence[Call], each: Sequence[dict[str, Any]]
) -> list[Trained]:
    """:func:`train` with each of these options."""
    return [train(group, make, calls, **options) for options in each]


def drawn_behind_steps(where: Where, make: Make, calls: Sequence[Call]) -> list[Tensor]:
    """What the default generator of a process gives behind each step."""
    drawn = []
    with compiled(where, make, mean_loss, example_inputs=calls[0].args, chunks=2) as pipe:
        torch.manual_seed(7)
        for call in calls:
            pipe.step(*call.args, target=call.target)
            drawn.append(torch.rand(3))
    return drawn


def stepped(where: Where, make: Make, calls: Sequence[Sequence[Call]]) -> str:
    """Make a step for each call of this rank, and return the error that one of them raises."""
    with compiled(where, make, mean_loss, example_inputs=calls[0][0].args, chunks=2) as pipe:
        for call in calls[dist.get_rank()]:
            try:
                pipe.step(*call.args, target=call.target)
            except RankError as error:
                return str(error)
    return ""


def checkpointed(group: Where, make: Make, call: Call, **options: Any) -> dict[int, set[bool]]:
    """By stage: whether its forwards keep no activations, as the step graph of this rank says."""
    with compiled(group, make, mean_loss, example_inputs=call.args, **options) as pipe:
        pipe.step(*call.args, target=call.target)
        forwards = pipe.step_graph.graph.find_nodes(op="call_function", target=ops.forward)
        found: dict[int, set[bool]] = {}
        for node in forwards:
            found.setdefault(node.meta[STAGE], set()).add(node.args[-1])
    return found


def outputs(group: Where, make: Make, x: Tensor, **options: Any) -> list[Any]:
    """What a rank gets of calls in eval mode, also with ``broadcast``; without gradients, unless
    the pipeline sees to that by itself. An output that refuses a backward comes without it."""
    with (
        compiled(group, make, None, example_inputs=(x,), **options) as pipe,
        torch.set_grad_enabled(not options.get("training", True)),
    ):
        pipe.eval()
        found = [pipe(x), pipe(x, broadcast=True)]
        return [output if output is None else output.detach() for output in found]


def chosen(where: Where, make: Make, call: Call, **options: Any) -> tuple[Any, Trained]:
    """What has been chosen by prediction, and a step as it is taken then."""
    with compiled(where, make, mean_loss, example_inputs=call.args, **options) as pipe:
        choice = pipe._runner.options.choice
        losses = [pipe.step(*call.args, target=call.target)]
        grads = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    return choice, Trained(losses, grads, {}, None)


def unfit(group: Where, make: Make, x: Tensor, **options: Any) -> str:
    """What a rank says where no cut fits."""
    with pytest.raises((fxpipe.DoesNotFit, RankError)) as error:
        compiled(group, make, mean_loss, example_inputs=(x,), **options).close()
    return f"{type(error.value).__name__}: {error.value}"


def said_to_a_backward(group: Where, make: Make, x: Tensor, **options: Any) -> str:
    """What a rank says to a backward from an output that all ranks get."""
    with compiled(group, make, None, example_inputs=(x,), **options) as pipe:
        loss = pipe(x, broadcast=True).sum() + sum(p.sum() for p in pipe.parameters())
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        return str(error.value)


def said_to_an_optimizer_in_hooks(group: Where, make: Make, call: Call, **options: Any) -> str:
    """What a rank says to a step in which hooks on its parameters step them."""
    with compiled(group, make, mean_loss, example_inputs=call.args, **options) as pipe:
        for parameter in pipe.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step() and None)
        before = [p.detach().clone() for p in pipe.parameters()]
        with pytest.raises(RuntimeError) as error:
            pipe.step(*call.args, target=call.target)
        assert all(map(torch.equal, before, pipe.parameters()))
        return str(error.value)


def drawn(group: Where, make: Make, call: Call, **options: Any) -> tuple[str, str, str, str]:
    """The pictures of this rank's program and of all, and the report, after a step; and what is
    said to the first of them before any step."""
    with compiled(group, make, mean_loss, example_inputs=call.args, **options) as pipe:
        try:
            said = pipe.draw("rank").source
        except RuntimeError as error:
            said = str(error)
        pipe.step(*call.args, target=call.target)
        return pipe.draw("rank").source, pipe.draw("ranks").source, str(pipe.report()), said


def refusals(group: Where, make: Make, x: Tensor) -> list[str]:
    """What a rank says to calls that ranks do not take."""
    pipe = compiled(group, make, mean_loss)
    said = []
    for call in (
        lambda: pipe(x),
        lambda: list(pipe.parameters()),
        lambda: pipe.__getstate__(),
        lambda: compiled(group, make, mean_loss, stage_backend="inductor"),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def loaded(group: Where, make: Make, x: Tensor, whole: dict[str, Tensor]) -> Any:
    """The output of ranks that have loaded a state dict of the model, and what they say to one that
    lacks something."""
    with compiled(group, make, None, example_inputs=(x,)) as pipe:
        pipe.load_state_dict(whole)
        with torch.no_grad():
            output = pipe(x, broadcast=True)
        try:
            pipe.load_state_dict({})
        except RuntimeError as error:
            return output, str(error)
    return output, None


class Breaking(nn.Module):
    """The layer that is named breaks down when it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.c, self.d = nn.Linear(3, 3), nn.Linear(3, 3)
        self.where, self.is_broken = where, False
        layer, _, self.when = where.partition(" ")
        if self.when == "backward":
            self.get_submodule(layer).register_full_backward_hook(self.check)
        else:
            self.get_submodule(layer).register_forward_hook(self.check)

    def check(self, *_: Any) -> None:
        if BROKEN:
            raise ValueError("it is broken")

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


BROKEN: list[bool] = []


def breaking(group: dist.ProcessGroup, where: str, call: Call, **options: Any) -> tuple[Any, ...]:
    """A step, one in which a layer breaks down on its rank, and another step: what each gives."""
    make = functools.partial(Breaking, where)
    with compiled(group, make, mean_loss, example_inputs=call.args, **options) as pipe:
        before = pipe.step(*call.args, target=call.target)
        BROKEN.append(True)
        try:
            said = repr(pipe.step(*call.args, target=call.target))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        BROKEN.clear()
        after = pipe.step(*call.args, target=call.target)
    return before, said, after


class Overflowing(nn.Module):
    """When it is told to, a gradient of the layer that is named is inf. One layer has no parameters
    to train."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.Tanh(),
            nn.Linear(3, 3),
        )
        weight = self.get_parameter(f"{where}.weight")
        weight.register_hook(lambda grad: grad * float("inf") if BROKEN else grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


def scaled(
    where: Where, layer: str, calls: Sequence[Call], max_grad_norm: float | None
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train with a scaler, where the layer's gradient is inf in the second step. Returns the loss,
    the gradients' norm and the scaler's state after each step, and the parameters at the end."""
    make = functools.partial(Overflowing, layer)
    options = {"chunks": 3, "schedule": "1f1b", "example_inputs": calls[0].args}
    size = where if isinstance(where, int) else dist.get_world_size(where)
    options["partition"] = {4: ["b", "c", "d"], 2: ["c"]}[size]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    after: list[Any] = []
    with compiled(where, make, mean_loss, **options) as pipe:
        parameters = list(pipe.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1) if parameters else None
        for number, call in enumerate(calls):
            BROKEN[:] = [True] * (number == 1)
            how = {"scaler": scaler, "optimizer": optimizer, "max_grad_norm": max_grad_norm}
            how |= {"zero_grad": True, "accumulate": 2}
            loss = pipe.step(*call.args, target=call.target, **how)
            after.append((loss, pipe.grad_norm, scaler.state_dict()))
        BROKEN.clear()
        return after, {n: p.detach().clone() for n, p in pipe.named_parameters()}


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target) * self.scale.exp() - self.scale


def clipped(where: Where, make: Make, call: Call) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A step that clips the gradients, with a loss that has a parameter: their norm, that parameter
    and those of the model after it."""
    loss_fn = Weighted()
    with compiled(where, make, loss_fn, chunks=3, example_inputs=call.args) as pipe:
        optimizer = torch.optim.SGD([*pipe.parameters(), *loss_fn.parameters()], lr=0.1)
        pipe.step(*call.args, target=call.target, optimizer=optimizer, max_grad_norm=0.1)
        own = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        return pipe.grad_norm, loss_fn.scale.detach().clone(), own


def scalers_apart(group: dist.ProcessGroup, call: Call) -> list[str]:
    """What a rank says to a scaler without an optimizer, and to scalers in different states."""
    said = []
    options = {"chunks": 2, "example_inputs": call.args, "partition": ["c"]}
    with compiled(group, functools.partial(Overflowing, "a"), mean_loss, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        before = [p.detach().clone() for p in pipe.parameters()]
        for given in None, optimizer:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + dist.get_rank(group)))
            try:
                pipe.step(*call.args, target=call.target, scaler=scaler, optimizer=given)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        assert all(map(torch.equal, before, pipe.parameters()))
    return said


class Hanging(Breaking):
    """The layer that is named does not come back for long when it is told to."""

    def check(self, *_: Any) -> None:
        if BROKEN:
            BROKEN.clear()
            time.sleep(HANGS)


HANGS = 9.0


def hanging(group: dist.ProcessGroup, where: str, call: Call, timeout: float) -> str:
    """What a rank says of a step in which a layer hangs, in a group that waits for so long (s)."""
    ranks = dist.get_process_group_ranks(group)
    impatient = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
    make = functools.partial(Hanging, where)
    options = {"chunks": 4, "schedule": "1f1b", "partition": ["b", "c", "d"]}
    with compiled(impatient, make, mean_loss, example_inputs=call.args, **options) as pipe:
        pipe.step(*call.args, target=call.target)
        BROKEN.append(True)
        start = time.monotonic()
        try:
            said = repr(pipe.step(*call.args, target=call.target))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        ended_first = time.monotonic() - start < HANGS
        BROKEN.clear()
    return said if ended_first else f"after the hang: {said}"


class _JustInTime(Future):
    """Its result comes at the moment at which somebody stops waiting for it."""

    def result(self, timeout: float | None = None) -> Any:
        if self.done():
            return super().result(timeout)
        self.set_result("here")
        raise TimeoutError


def just_in_time(group: dist.ProcessGroup) -> str:
    """What a rank gets that waits for an answer, looks for an alarm, and finds the answer."""
    alarm = Alarm(dist.get_rank(group), dist.get_world_size(group))
    try:
        return alarm.wait(_JustInTime())
    finally:
        alarm.close()


def timelines(group: dist.ProcessGroup, make: Make, call: Call) -> Any:
    """The timeline of a step, and whether gradients are as they were before it was measured."""
    options = {"chunks": 3, "schedule": "1f1b", "example_inputs": call.args}
    with compiled(group, make, mean_loss, **options) as pipe:
        pipe.step(*call.args, target=call.target)
        before = [p.grad.clone() for p in pipe.parameters()]
        found = pipe.measure(*call.args, target=call.target, rounds=1)
        return found, same([p.grad for p in pipe.parameters()], before)


def apart(group: dist.ProcessGroup, kind: str) -> str:
    """What a rank says if rank 1 does something else than the others."""
    is_other = dist.get_rank(group) == 1
    x, y = torch.ones(8, 3), torch.ones(8)
    width = 4 if is_other and kind == "model" else 3
    options: dict[str, Any] = {"check": False} if kind in ("options", "shapes") else {}
    if is_other and kind == "options":
        options["checkpoint"] = "always"
    if kind == "shapes":
        options |= {"tracer": "symbolic", "partition": ["1", "2", "3"]}

    def make() -> nn.Module:
        if is_other and kind == "error":
            return Refusing()
        if kind == "shapes":  # modules that the graph keeps whole
            padded = nn.ZeroPad1d((0, int(is_other))), nn.AdaptiveAvgPool1d(3)
            return nn.Sequential(nn.Linear(3, 3), *padded, nn.Linear(3, 3))
        return nn.Sequential(*(nn.Linear(3, width), nn.Linear(width, 3)) * 2)

    try:
        with compiled(group, make, mean_loss, chunks=4, **options) as pipe:
            if kind != "batch" or not is_other:
                pipe.step(x, target=y)
            else:
                pipe.step(x[:6], target=y[:6])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Refusing(nn.Module):
    """A model that cannot be run."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not here")


def without_inputs(group: Where, make: Make, call: Call, is_meta: bool, **options: Any) -> Any:
    """Train with inputs on the first rank only, and targets on the last only; others have None, or
    tensors on "meta". Then a smaller batch, and a call in eval mode."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1

    def here(value: Tensor, is_here: bool) -> Tensor | None:
        return value if is_here else value.to("meta") if is_meta else None

    (x,), losses = call.args, []
    with compiled(group, make, mean_loss, **options) as pipe:
        for count in (len(x), len(x), 3):
            y = here(call.target[:count], rank == last)
            losses.append(pipe.step(here(x[:count], rank == 0), target=y))
        grads = {n: p.grad.clone() for n, p in pipe.named_parameters()}
        pipe.eval()
        with torch.no_grad():
            output = pipe(here(x, rank == 0), broadcast=True)
        try:
            said = repr(pipe.step(here(x, rank == last), target=here(call.target, rank == 0)))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return losses, grads, output, said


def labelled_loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the labels that count."""
    return nn.functional.cross_entropy(output, target)


def told_of_labels(group: Where, make: Make, x: Tensor, **options: Any) -> list[list[str]]:
    """What steps warn of. Only the last rank has the labels, of which the second step leaves out
    those of the first micro-batch."""
    is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
    labels = torch.arange(len(x)) % x.shape[1]
    padded = labels.clone()
    padded[: len(x) // 4] = -100
    said = []
    with compiled(group, make, labelled_loss, **options) as pipe:
        for target in (labels, padded, labels):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipe.step(x, target=target if is_last else None)
            said.append([str(each.message) for each in caught])
    return said


def contrastive_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that compares each row with all others: no mean of those of micro-batches is it."""
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def told_of_loss(group: Where, make: Make, x: Tensor, loss_fn: Any, **options: Any) -> list[str]:
    """What a step with a loss warns of."""
    with compiled(group, make, loss_fn, **options) as pipe:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(x, target=x)
        return [str(each.message) for each in caught]


@contextmanager
def noting_messages(sent: list[str]):
    """Note what this process begins to send: headers, those that follow a mark ("late header"),
    descriptions as text, and the memory of tensors that the receiver expects or does not
    ("rest")."""
    send = vars(dist.ProcessGroup)["send"]
    kinds = {
        transport.HEADER: "header",
        transport.LATE: "late header",
        transport.TEXT: "text",
        transport.TENSOR: "tensor",
        transport.REST: "rest",
    }

    def noted(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> Any:
        if tag in kinds:
            sent.append(kinds[tag])
        return send(group, tensors, to, tag)

    dist.ProcessGroup.send = noted
    try:
        yield
    finally:
        dist.ProcessGroup.send = send


def messages(
    group: dist.ProcessGroup, name: str, runs: Sequence[Sequence[Any]], sizes: Sequence[Any]
) -> list[Any]:
    """Let rank 0 send to rank 1 what each run has, of which an exception is raised instead. Returns
    for each run what has been sent, on rank 0, or received, on rank 1, or the error.

    Args:
        name: differs from call to call.
        sizes: the bytes that are expected of each message in the first run.
    """
    rank, edge, found = dist.get_rank(group), (0, 1), []
    names, alarm = ["rank 0", "rank 1"], Alarm(rank, 2)
    alarm.name = name
    watch, patience = Watch(name, rank, names), timedelta(seconds=60)
    way = transport.GroupTransport(group, torch.device("cpu"), patience, names, watch, alarm)
    way.connect([edge])
    for values in runs:
        sent: list[str] = []

        def program(values: Any = values) -> list[Any]:
            got = []
            for number, value in enumerate(values):
                if rank:
                    got.append(way.receive(edge, number).wait())
                elif isinstance(value, Exception):
                    raise value
                else:
                    way.transmit(value, edge, number)
            return got

        alarm.begin()
        plan = {edge: [transport.Planned(0, "a value")] * len(values)}
        try:
            with noting_messages(sent):
                got = way.run(program, plan, 0, "the same", {edge: sizes})
            found.append(got if rank else sent)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    way.close()
    alarm.close()
    return found


def messages_that_meet(*args: Any) -> list[Any]:
    """:func:`messages`, where each transmit waits for its receive."""
    with rendezvous():
        return messages(*args)


def sent_in_steps(group: dist.ProcessGroup, make: Make, calls: Sequence[Call], **options: Any):
    """What this rank begins to send in each step, in order."""
    found = []
    with compiled(group, make, mean_loss, example_inputs=calls[0].args, **options) as pipe:
        for call in calls:
            sent: list[str] = []
            with noting_messages(sent):
                pipe.step(*call.args, target=call.target)
            found.append(sent)
    return found
