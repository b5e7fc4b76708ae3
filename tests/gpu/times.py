"""Parts that measure: times of steps and of the host, memory, and traces of where the time goes."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.machine import Machine
from tests.gpu.nets import blocks, cut, dense, mean_loss, pipeline
from tests.gpu.part import Report
from tests.gpu.right import difference
from tests.gpu.right import host as on_host
from tests.zoo import loss_of

MIB = 2**20


def loop_of(model: nn.Module, x: Tensor, target: Tensor, chunks: int) -> Callable[[], None]:
    """A training step as a plain loop over the micro-batches."""

    def run() -> None:
        for part, wanted in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
            (mean_loss(model(part), wanted) / chunks).backward()

    return run


def backward_of(model: Callable[[Tensor], Any], x: Tensor, target: Tensor) -> Callable[[], object]:
    """A forward of the whole batch, and the backward of its loss."""
    return lambda: mean_loss(model(x), target).backward()


# --------------------------------------------------------------------------------------- host time


def host(machine: Machine, report: Report) -> None:
    """What a stage and micro-batch costs the host: CPU time of tiny layers, over a plain loop's."""
    here, chunks = machine.name(), 8
    for lanes in (1, 2, 4):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(lanes))).to(here)
        x, target = torch.randn(2 * chunks, 8, device=here), torch.randn(2 * chunks, device=here)
        cells = lanes * chunks
        plain = _host_s(machine, loop_of(model, x, target, chunks))
        report.row(lanes=lanes, run="loop", cpu_us=plain[0] / cells, wall_us=plain[1] / cells)
        for schedule in machine.pick(("gpipe", "1f1b", "zb_h1"), ("1f1b",)):
            how: dict[str, Any] = {"chunks": chunks, "schedule": schedule, "loss_fn": mean_loss}
            with pipeline(model, [here] * lanes, partition=cut(model), **how) as pipe:
                runs = {f"step, {schedule}": partial(pipe.step, x, target=target)}
                if schedule == "1f1b":
                    runs["pipe(x) and backward()"] = backward_of(pipe, x, target)
                for name, run in runs.items():
                    cpu, wall = _host_s(machine, run)
                    report.row(
                        lanes=lanes,
                        run=name,
                        cpu_us=cpu / cells,
                        wall_us=wall / cells,
                        cpu_us_over_loop=(cpu - plain[0]) / cells,
                    )
    report.note("Microseconds for a stage and micro-batch, forward and backward; wall without GPU.")


def _host_s(machine: Machine, run: Callable[[], object]) -> tuple[float, float]:
    """The microseconds of a call on the host, of the CPU and of the clock. The GPU is waited for
    outside of what is measured, because that wait spins."""
    cpu, wall = [], []
    for _ in range(machine.pick(30, 2)):
        machine.synchronize()
        begin, clock = time.process_time(), time.perf_counter()
        run()
        cpu.append(time.process_time() - begin)
        wall.append(time.perf_counter() - clock)
    machine.synchronize()
    return 1e6 * sorted(cpu)[len(cpu) // 2], 1e6 * sorted(wall)[len(wall) // 2]


def forward_of(model: nn.Module, x: Tensor, chunks: int, count: int) -> Callable[[], None]:
    """A forward of each micro-batch, on ``count`` streams of one device in turn."""
    streams = [torch.Stream(x.device) for _ in range(count)]

    def run() -> None:
        here = torch.accelerator.current_stream(x.device)
        for stream in streams:
            stream.wait_stream(here)
        for i, part in enumerate(x.chunk(chunks)):
            with torch.no_grad(), streams[i % count]:
                model(part)
        for stream in streams:
            here.wait_stream(stream)

    return run


def lanes(machine: Machine, report: Report) -> None:
    """A step with large stages, whose lanes share one GPU, against the loop: it should take as
    long. Lanes that share a GPU share a stream there: how much faster are micro-batches on two?"""
    here, chunks = machine.name(), 8
    width, layers, rows = machine.pick((4096, 8, 512), (16, 1, 2))
    for stages in (1, 2, 4):
        model = dense(stages, width, layers).to(here)
        x = torch.randn(chunks * rows, width, device=here)
        target = torch.randn(chunks * rows, device=here)
        plain = machine.seconds(loop_of(model, x, target, chunks))
        report.row(stages=stages, run="loop", ms=1e3 * plain, ratio=1.0)
        one, two = (machine.seconds(forward_of(model, x, chunks, count)) for count in (1, 2))
        report.row(stages=stages, run="forwards on one stream", ms=1e3 * one, ratio=1.0)
        report.row(stages=stages, run="forwards on two streams", ms=1e3 * two, ratio=two / one)
        for schedule in machine.pick(("gpipe", "1f1b", "zb_h1"), ("1f1b",)):
            how: dict[str, Any] = {"chunks": chunks, "schedule": schedule, "loss_fn": mean_loss}
            with pipeline(model, [here] * stages, partition=cut(model), **how) as pipe:
                seconds = machine.seconds(partial(pipe.step, x, target=target))
            report.row(stages=stages, run=schedule, ms=1e3 * seconds, ratio=seconds / plain)
            if machine.is_real and seconds > 1.15 * plain:
                slower = seconds / plain - 1
                report.problem(f"{schedule} with {stages} lanes is {slower:.0%} slower than a loop")


# ------------------------------------------------------------------------------------------ inputs


def inputs(machine: Machine, report: Report) -> None:
    """A batch in pageable memory, in pinned memory, and on the GPU: the time of a call, and whether
    the caller may write into the batch once the call has returned."""
    here, chunks = machine.name(), 8
    rows, size = machine.pick((256, 128), (8, 8))
    model = blocks(2).to(here)
    x = torch.randn(rows, 8, size, size)
    kinds = {"pageable": x, "pinned": machine.pinned(x), "on the device": x.to(here)}
    target = torch.randn(rows, device=here)
    how: dict[str, Any] = {"chunks": chunks, "schedule": "1f1b", "loss_fn": mean_loss}
    with (
        machine.deterministic(),
        pipeline(model, [here] * 2, partition=cut(model), **how) as pipe,
        torch.no_grad(),
    ):
        wanted = on_host(pipe(kinds["on the device"]))
    with pipeline(model, [here] * 2, partition=cut(model), **how) as pipe:
        for kind, batch in kinds.items():
            if batch is None:
                report.row(batch=kind, result="there is no pinned memory")
                continue
            seconds = machine.seconds(partial(pipe.step, batch, target=target))
            begin = time.perf_counter()
            pipe.step(batch, target=target)
            returned = time.perf_counter() - begin
            machine.synchronize()
            with machine.deterministic(), torch.no_grad():
                pipe(batch)
                machine.synchronize()
                batch = batch.clone() if kind != "pinned" else batch
                output = pipe(batch)
                batch.fill_(torch.nan)  # as a loader does that reuses its buffers
            apart = difference(output, wanted)
            report.row(
                batch=kind,
                step_ms=1e3 * seconds,
                returns_after_ms=1e3 * returned,
                overwritten="right" if apart == 0 else f"differs by {apart:.1e}",
            )
            if apart > 1e-5:
                report.problem(f"a {kind} batch that is overwritten after the call is corrupted")


# ------------------------------------------------------------------------------------------ memory


def memory(machine: Machine, report: Report) -> None:
    """The most memory of a training step with AdamW, for more and more micro-batches of one size,
    measured and predicted. With 1F1B it must not grow with their number. The batch is the caller's,
    and not counted. Both lanes are on one GPU, where micro-batches are not copied: a prediction,
    which is for lanes on devices of their own, counts what is sent twice."""
    here = machine.name()
    width, layers, rows = machine.pick((2048, 4, 1024), (16, 1, 4))
    for schedule in ("gpipe", "1f1b"):
        held = {}
        for chunks in machine.pick((4, 8, 16, 32), (4, 8)):
            machine.synchronize()
            torch.accelerator.empty_cache()
            before = machine.allocated()
            model = dense(2, width, layers).to(here)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            x = torch.randn(chunks * rows, width, device=here)
            target = torch.randn(chunks * rows, device=here)
            batch = x.nbytes + target.nbytes
            how: dict[str, Any] = {"chunks": chunks, "schedule": schedule, "loss_fn": mean_loss}
            with pipeline(model, [here] * 2, partition=cut(model), **how) as pipe:
                for _ in range(2):  # then the optimizer has its states, and gradients are there
                    pipe.step(x, target=target, optimizer=optimizer)
                machine.synchronize()
                machine.forget_peaks()
                for _ in range(3):
                    pipe.step(x, target=target, optimizer=optimizer)
                machine.synchronize()
                allocated = machine.most_allocated() - before - batch
                predicted = sum(pipe.timeline().peak_memory)
            held[chunks] = allocated
            report.row(
                schedule=schedule,
                chunks=chunks,
                allocated_mib=allocated / MIB,
                reserved_mib=machine.most_reserved() / MIB,
                batch_mib=batch / MIB,
                predicted_mib=predicted / MIB,
                ratio=allocated / predicted,
            )
            del model, optimizer, x, target, pipe
        few, many = min(held), max(held)
        if schedule == "1f1b" and machine.is_real and held[many] > 1.2 * held[few]:
            report.problem(
                f"1f1b holds {held[many] / MIB:.0f} MiB for {many} micro-batches and "
                f"{held[few] / MIB:.0f} MiB for {few}: it grows with their number"
            )


# ------------------------------------------------------------------------------------------ traces


def trace(machine: Machine, report: Report) -> None:
    """A warm step of large stages as Perfetto shows it, and how busy each stream was."""
    devices = machine.all if machine.count > 1 else [machine.name()] * 2
    stages, chunks = len(devices), 2 * len(devices)
    width, layers, rows = machine.pick((4096, 4, 512), (16, 1, 2))
    model = dense(stages, width, layers).to(devices[0])
    x = torch.randn(chunks * rows, width)
    target = torch.randn(chunks * rows)
    how: dict[str, Any] = {"chunks": chunks, "schedule": "1f1b", "loss_fn": mean_loss}
    with pipeline(model, devices, partition=cut(model), **how) as pipe:
        profiled(machine, report, "step-1f1b", lambda: pipe.step(x, target=target))
        profiled(machine, report, "backward", lambda: loss_of(pipe(x)).backward())
        pipe.timeline().to_perfetto(str(report.file("trace-predicted.json")))


def profiled(machine: Machine, report: Report, name: str, run: Callable[[], object]) -> None:
    """Write the trace of a call as Perfetto reads it, with a row for each stream of a GPU."""
    for _ in range(2):
        run()
    machine.synchronize()
    path = report.file(f"trace-{name}.json.gz")
    with machine.profiler() as profiler:
        run()
        machine.synchronize()
    profiler.export_chrome_trace(str(path))
    for row in _busy(path):
        report.row(trace=name, **row)


GPU_WORK = "kernel", "gpu_memcpy", "gpu_memset"


def _busy(path: Path) -> list[dict[str, Any]]:
    """For each stream, and for each GPU, the part of the time in which it did something."""
    opened = gzip.open if path.read_bytes()[:2] == b"\x1f\x8b" else open
    with opened(path, "rt") as file:  # type: ignore[operator]
        events = json.load(file)["traceEvents"]
    spans: dict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU_WORK and event.get("ph") == "X":
            where, begin = event.get("args", {}), float(event["ts"])
            span = begin, begin + float(event["dur"])
            spans[where.get("device"), where.get("stream")].append(span)
            spans[where.get("device"), "all"].append(span)
    if not spans:
        return [{"device": "", "stream": "", "host_events": len(events)}]
    first = min(begin for each in spans.values() for begin, _ in each)
    whole = max(end for each in spans.values() for _, end in each) - first
    return [
        {
            "device": device,
            "stream": stream,
            "operations": len(each),
            "busy_ms": _covered(each) / 1e3,
            "of_the_time": _covered(each) / whole,
        }
        for (device, stream), each in sorted(spans.items(), key=str)
    ]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time is in at least one of the spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
