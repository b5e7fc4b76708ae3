"""Parts that compare: compiled stages with the compiled model, fxpipe with other libraries, and
models of published sizes."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from tests.gpu.machine import Machine
from tests.gpu.needs import has_program
from tests.gpu.nets import Large, blocks, cut, dense, large, mean_loss, pipeline
from tests.gpu.part import Report, Skip
from tests.gpu.right import difference
from tests.gpu.times import backward_of, loop_of
from tests.zoo import gradients

CHUNKS = 8


# ---------------------------------------------------------------------------------- compiled stages


def compiled(machine: Machine, report: Report) -> None:
    """Steps of a pipeline whose stages are compiled, beside the compiled model in a loop."""
    if "stage_backend" not in inspect.signature(fxpipe.compile).parameters:
        raise Skip("fxpipe.compile has no stage_backend yet")
    if machine.is_real and not (find_spec("triton") and has_program("gcc")):
        raise Skip("inductor needs Triton and gcc")
    backend = machine.pick("inductor", "aot_eager")
    device = machine.pick(machine.name(), "cpu")  # no backend knows the simulated accelerator
    rows, size = machine.pick((64, 64), (8, 8))
    model = blocks(2).to(device)
    twin = copy.deepcopy(model)
    x, target = torch.randn(rows, 8, size, size, device=device), torch.randn(rows, device=device)
    once = torch.compile(twin, backend=backend)
    plain = machine.seconds(loop_of(once, x, target, CHUNKS))
    report.row(run="compiled model in a loop", ms=1e3 * plain)
    twin.zero_grad()
    loop_of(once, x, target, CHUNKS)()
    wanted = gradients(twin)
    for schedule in machine.pick(("1f1b", "zb_h1"), ("1f1b",)):
        for checkpoint in machine.pick(("never", "always"), ("never",)):
            how: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint}
            how |= {"chunks": CHUNKS, "loss_fn": mean_loss, "partition": cut(model)}
            with pipeline(model, [device] * 2, stage_backend=backend, **how) as pipe:
                seconds = machine.seconds(lambda pipe=pipe: pipe.step(x, target=target))
                model.zero_grad()
                pipe.step(x, target=target)
                apart = difference(gradients(model), wanted)
            run = f"{schedule}, checkpoint {checkpoint}"
            report.row(run=run, ms=1e3 * seconds, ratio=seconds / plain, difference=apart)
            if apart > 1e-3:
                report.problem(f"gradients of {run} differ by {apart:.1e}")


# ---------------------------------------------------------------------------------- other libraries


def beside(machine: Machine, report: Report) -> None:
    """One net and one batch by fxpipe, torchgpipe and torch.distributed.pipelining, on the same
    devices."""
    devices = machine.two if machine.count > 1 else [machine.name()] * 2
    width, layers, rows = machine.pick((4096, 4, 512), (16, 1, 2))
    x = torch.randn(CHUNKS * rows, width, device=devices[0])
    target = torch.randn(CHUNKS * rows, device=devices[-1])

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return dense(2, width, layers)

    model = net().to(devices[0])
    here = target.to(devices[0])
    plain = machine.seconds(loop_of(model, x, here, CHUNKS))

    def row(run: str, seconds: float) -> None:
        report.row(run=run, devices=" ".join(devices), ms=1e3 * seconds, speed_up=plain / seconds)

    report.row(run="loop", devices=devices[0], ms=1e3 * plain, speed_up=1.0)
    for schedule in ("gpipe", "1f1b"):
        how: dict[str, Any] = {"chunks": CHUNKS, "schedule": schedule, "loss_fn": mean_loss}
        with pipeline(model, devices, partition=cut(model), **how) as pipe:
            row(f"fxpipe, {schedule}", machine.seconds(lambda p=pipe: p.step(x, target=target)))
            if schedule == "gpipe":
                run = backward_of(pipe, x, target)
                row("fxpipe, pipe(x) and backward()", machine.seconds(run))
    if find_spec("torchgpipe") is None:
        report.note("torchgpipe: not installed.")
    else:
        _torchgpipe(machine, report, net(), devices, x, target, row)
    _pipelining(machine, report, (width, layers, rows))


def _torchgpipe(
    machine: Machine,
    report: Report,
    net: nn.Sequential,
    devices: list[str],
    x: Tensor,
    target: Tensor,
    row: Callable[[str, float], None],
) -> None:
    if not machine.is_real:
        devices, x, target = ["cpu"] * 2, x.cpu(), target.cpu()  # it knows CUDA and the CPU
    try:
        from torchgpipe import GPipe

        gpipe = GPipe(net, [1, 1], devices=devices, chunks=CHUNKS, checkpoint="never")
        row("torchgpipe", machine.seconds(backward_of(gpipe, x, target)))
    except Exception as error:  # it was written for PyTorch of 2020
        report.note(f"torchgpipe: {type(error).__name__}: {str(error)[:200]}")


def _pipelining(machine: Machine, report: Report, sizes: tuple[int, int, int]) -> None:
    """As many ranks as there are different GPUs, two at the most; with one there is one stage."""
    import torch.multiprocessing as mp

    world = min(2, machine.count)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, args=(world, folder, machine.is_real, sizes), nprocs=world)
            seconds = float((Path(folder) / "seconds").read_text())
        except Exception as error:
            report.note(f"torch.distributed.pipelining: {type(error).__name__}: {str(error)[:300]}")
            return
    where = "cuda" if machine.is_real else "cpu"
    kind = "ScheduleGPipe" if world == 1 else "Schedule1F1B"
    run = f"torch.distributed.pipelining, {kind}, {world} rank{'s' * (world > 1)}"
    report.row(run=run, devices=f"{world} x {where}", ms=1e3 * seconds)


def _rank(rank: int, world: int, folder: str, is_real: bool, sizes: tuple[int, int, int]) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    width, layers, rows = sizes
    device = torch.device("cuda", rank) if is_real else torch.device("cpu")
    if is_real:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_real and world > 1 else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
    )
    torch.manual_seed(0)
    net = dense(2, width, layers)
    module = (net[rank] if world > 1 else net).to(device)
    x, target = torch.randn(CHUNKS * rows, width), torch.randn(CHUNKS * rows)
    stage = PipelineStage(module, rank, world, device)
    kind: Any = Schedule1F1B if world > 1 else ScheduleGPipe
    schedule = kind(stage, CHUNKS, loss_fn=mean_loss)
    given = (x.to(device),) if rank == 0 else ()
    wanted = {"target": target.to(device)} if rank == world - 1 else {}
    machine = Machine("cuda" if is_real else "sim", int(is_real))
    seconds = machine.seconds(lambda: schedule.step(*given, **wanted))
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(seconds))
    dist.destroy_process_group()


# ------------------------------------------------------------------------------ models as published


def large_models(machine: Machine, report: Report) -> None:
    """Tokens or samples a second of training steps, without an optimizer."""
    torch.set_float32_matmul_precision("high")  # TF32, as most people train
    here = machine.name()
    lanes = {"fxpipe, two lanes on one GPU": [here] * 2}
    if machine.count > 1:
        more = {f"fxpipe, {machine.count} GPUs": machine.all}
        lanes = machine.pick({**more, **lanes}, more)
    for make in large(machine, CHUNKS):
        work = make()
        model = work.model.to(here)
        x, target = tuple(t.to(here) for t in work.inputs), work.target.to(here)
        plain = machine.seconds(_large_loop(work, model, x, target), rounds=3)
        _throughput(report, work, "loop", plain, plain)
        for name, devices in lanes.items():
            try:
                how: dict[str, Any] = {"chunks": CHUNKS, "schedule": "1f1b"}
                with pipeline(model, devices, loss_fn=work.loss_fn, **how) as pipe:
                    seconds = machine.seconds(
                        lambda pipe=pipe, x=x, target=target: pipe.step(*x, target=target), rounds=3
                    )
                    _throughput(report, work, name, seconds, plain)
            except Exception as error:  # the others shall be measured
                text = str(error).splitlines()[0][:300] if str(error) else ""
                report.problem(f"{work.name}, {name}: {type(error).__name__}: {text}")
        del work, model, x, target
        torch.accelerator.empty_cache()
    report.note(f"{CHUNKS} micro-batches, forward and backward in TF32; ratio is over the loop.")


def _large_loop(
    work: Large, model: nn.Module, x: tuple[Tensor, ...], target: Tensor
) -> Callable[[], None]:
    def run() -> None:
        rows = zip(*(t.chunk(CHUNKS) for t in (*x, target)), strict=True)
        for *given, wanted in rows:
            (work.loss_fn(model(*given), wanted) / CHUNKS).backward()

    return run


def _throughput(report: Report, work: Large, run: str, seconds: float, plain: float) -> None:
    report.row(
        model=work.name,
        run=run,
        a_second=round(work.count / seconds, 1),
        unit=work.unit,
        step_ms=1e3 * seconds,
        ratio=plain / seconds,
    )
