"""Parts that need two GPUs or more."""

from __future__ import annotations

import copy
import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.schedule import named
from tests.gpu.machine import Machine
from tests.gpu.needs import has_program
from tests.gpu.nets import blocks, cut, dense, mean_loss, pipeline, placed
from tests.gpu.part import Report, Skip
from tests.gpu.right import compared, difference, host
from tests.gpu.times import loop_of, profiled
from tests.zoo import gradients, loss_of, step_of_loop


def steps(machine: Machine, report: Report) -> None:
    """Parameters after 200 steps with SGD on two GPUs, against the loop on the same two: a race
    that comes once in a hundred steps shows as other bits."""
    devices, chunks, rows = machine.two, 4, 12
    for schedule in machine.pick(("1f1b", "zb_h1"), ("1f1b",)):
        model = blocks(2)
        twin = placed(copy.deepcopy(model), devices)
        how: dict[str, Any] = {"chunks": chunks, "schedule": schedule, "partition": cut(model)}
        with (
            machine.deterministic(),
            pipeline(model, devices, loss_fn=mean_loss, **how) as pipe,
        ):
            order = named(schedule, lanes=2, microbatches=chunks, stages=2)
            ours, theirs = (_sgd(each) for each in (model, twin))
            for _ in range(machine.pick(200, 4)):
                x, target = torch.randn(rows, 8, 16, 16), torch.randn(rows)
                x, target = x.to(devices[0]), target.to(devices[1])
                ours.zero_grad()
                pipe.step(x, target=target)
                ours.step()
                _, grads = step_of_loop(twin, (x,), target, pipe, order, chunks, mean_loss)
                for parameter, grad in zip(twin.parameters(), grads, strict=True):
                    parameter.grad = grad
                theirs.step()
            found, wanted = list(model.parameters()), list(twin.parameters())
            compared(report, found, wanted, schedule=schedule, devices=" ".join(devices))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


def far(machine: Machine, report: Report) -> None:
    """Traces of steps whose batch lies on the first GPU and whose target on the last."""
    devices = machine.all
    stages, chunks = len(devices), 2 * len(devices)
    width, layers, rows = machine.pick((4096, 4, 512), (16, 1, 2))
    model = dense(stages, width, layers).to(devices[0])
    x = torch.randn(chunks * rows, width, device=devices[0])
    target = torch.randn(chunks * rows, device=devices[-1])
    how: dict[str, Any] = {"chunks": chunks, "loss_fn": mean_loss, "partition": cut(model)}
    for schedule in machine.pick(("gpipe", "1f1b", "zb_h1"), ("1f1b",)):
        with pipeline(model, devices, schedule=schedule, **how) as pipe:
            profiled(machine, report, f"far-{schedule}", lambda p=pipe: p.step(x, target=target))
    with pipeline(model, devices, **how) as pipe:
        profiled(machine, report, "far-backward", lambda: loss_of(pipe(x)).backward())


def links(machine: Machine, report: Report) -> None:
    """Bytes a second between each two GPUs: one way, the other, and both at once."""
    size = machine.pick(256 * 2**20, 2**10)
    for one in range(machine.count):
        for other in range(one + 1, machine.count):
            here, there = machine.name(one), machine.name(other)
            a = torch.ones(size, dtype=torch.uint8, device=here)
            b = torch.ones(size, dtype=torch.uint8, device=there)
            streams = [torch.Stream(torch.device(here)), torch.Stream(torch.device(there))]
            machine.synchronize()
            rates = {
                "there": _rate(machine, [(a, there, streams[0])]),
                "back": _rate(machine, [(b, here, streams[1])]),
                "both": _rate(machine, [(a, there, streams[0]), (b, here, streams[1])]),
            }
            peer: Any = None
            if machine.is_real:
                peer = torch.cuda.can_device_access_peer(one, other)
            gigabytes = {f"{way}_gb_s": rate / 1e9 for way, rate in rates.items()}
            report.row(one=here, other=there, peer_access=peer, **gigabytes)


def _rate(machine: Machine, ways: list[tuple[Tensor, str, torch.Stream]]) -> float:
    """Bytes a second of copies, each on a stream of its source."""
    times, targets = 10, [torch.empty_like(t, device=device) for t, device, _ in ways]
    best = float("inf")
    for _ in range(3):
        machine.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            for (source, _, stream), target in zip(ways, targets, strict=True):
                with stream:
                    target.copy_(source, non_blocking=True)
        machine.synchronize()
        best = min(best, time.perf_counter() - begin)
    return times * sum(source.nbytes for source, _, _ in ways) / best


# ------------------------------------------------------------------------------------------- triton


@torch.library.custom_op("fxpipe_kit::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    """Three times x, by a kernel that runs on the *current* GPU, as Triton's do."""
    if x.is_cuda:
        return _tripled_by_triton(x)
    return x * torch.full((), 3.0, device=x.device.type)  # on the current device, too


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return tripled(grad)


tripled.register_autograd(_backward)


def _tripled_by_triton(x: Tensor) -> Tensor:
    from tests.gpu.kernel import tripled_kernel

    x = x.contiguous()
    output = torch.empty_like(x)
    block = 1024
    tripled_kernel[((x.numel() + block - 1) // block,)](x, output, x.numel(), BLOCK=block)
    return output


class Tripled(nn.Module):
    """A block, and after it a kernel of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = blocks(1)

    def forward(self, x: Tensor) -> Tensor:
        return tripled(self.block(x))


def triton(machine: Machine, report: Report) -> None:
    """A stage with a Triton kernel on the second GPU. The kernel runs on the current device of its
    thread: a lane that has not set its own runs it on the first GPU, on memory of the second."""
    if machine.is_real and not (find_spec("triton") and has_program("gcc")):
        raise Skip("Triton or gcc is not installed")
    devices = machine.two
    model = nn.Sequential(blocks(1), Tripled()).to(devices[0])
    twin = copy.deepcopy(model)
    x = torch.randn(8, 8, 16, 16, device=devices[0])
    for chunks in (1, 2):  # one micro-batch runs in the caller's thread
        for checkpoint in ("never", "always"):
            how: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint}
            with pipeline(model, devices, partition=["1.block.0.conv1"], **how) as pipe:
                twin.zero_grad()
                output, wanted = pipe(x), twin(x)
                loss_of(output).backward()
                loss_of(wanted).backward()
                found = host([output, *gradients(model)])
                apart = difference(found, host([wanted, *gradients(twin)]))
                cells = {"chunks": chunks, "checkpoint": checkpoint}
                report.row(**cells, stage_on=str(output.device), difference=apart)
            if apart > 1e-3:
                report.problem(f"a Triton stage gives other values, by {apart:.1e}: {cells}")


# ----------------------------------------------------------------------------------------- speed-up


def speed_up(machine: Machine, report: Report) -> None:
    """How much faster a step of equal stages is on s GPUs than a loop on one, as a part of s, and
    the ideal of GPipe and 1F1B with m micro-batches, which is m / (m + s - 1)."""
    width, layers, rows = machine.pick((4096, 8, 1024), (16, 1, 2))
    counts = [count for count in (2, 4, 8) if count <= machine.count]
    for stages in machine.pick(counts, counts[:1]):
        devices = machine.all[:stages]
        for chunks in machine.pick((2 * stages, 8 * stages), (4,)):
            model = dense(stages, width, layers).to(devices[0])
            x = torch.randn(chunks * rows, width, device=devices[0])
            target = torch.randn(chunks * rows, device=devices[-1])
            plain = machine.seconds(loop_of(model, x, target.to(devices[0]), chunks), rounds=3)
            ideal = chunks / (chunks + stages - 1)
            how: dict[str, Any] = {"chunks": chunks, "loss_fn": mean_loss}
            how["partition"] = cut(model)
            for schedule in machine.pick(("gpipe", "1f1b", "zb_h1"), ("1f1b",)):
                with pipeline(model, devices, schedule=schedule, **how) as pipe:
                    taken = machine.seconds(
                        lambda pipe=pipe, x=x, y=target: pipe.step(x, target=y), rounds=3
                    )
                report.row(
                    gpus=stages,
                    chunks=chunks,
                    schedule=schedule,
                    loop_ms=1e3 * plain,
                    step_ms=1e3 * taken,
                    speed_up=plain / taken,
                    of_all=plain / taken / stages,
                    ideal=ideal,
                )
            del model, x, target
