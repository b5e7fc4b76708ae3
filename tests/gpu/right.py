"""Parts that ask whether a pipeline computes what the model computes, and waits for what it
uses."""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.schedule import named
from tests.gpu.machine import Machine
from tests.gpu.nets import blocks, cut, mean_loss, placed, usual
from tests.gpu.part import Report, Skip
from tests.zoo import gradients, loop, loss_of, same, step_of_loop

ROOT = Path(__file__).parents[2]
CHUNKS, ROWS = 3, 7  # rows are divided by no number of micro-batches here
NEAR = 1e-4  # a difference beyond this is no rounding


def difference(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value of the tensor that it is in."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max((_apart(a, b) for a, b in pairs if isinstance(b, Tensor)), default=0.0)


def _apart(found: Tensor, wanted: Tensor) -> float:
    one, other = found.detach().cpu().double(), wanted.detach().cpu().double()
    if not other.numel() or torch.equal(one, other):
        return 0.0
    apart = (one - other).abs().nan_to_num(nan=torch.inf).max()
    return float(apart / other.abs().max().clamp_min(1e-12))


def host(values: Any) -> Any:
    """The same values on the host, as they are now."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), values)


def at(values: Any, device: str) -> Any:
    """The same values on a device, with their history."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), values)


def compared(report: Report, found: Any, wanted: Any, **cells: Any) -> None:
    """A row that says whether the bits are the same; other bits are a problem."""
    found, wanted = host(found), host(wanted)
    is_same, apart = same(found, wanted), difference(found, wanted)
    report.row(**cells, bits="same" if is_same else "differ", difference=apart)
    if not is_same:
        what = "other values" if apart > NEAR else "other bits"
        where = ", ".join(str(value) for value in cells.values())
        report.problem(f"{what} than expected, by {apart:.1e}: {where}")


# --------------------------------------------------------------------------------- against the loop


def bits(machine: Machine, report: Report) -> None:
    """Outputs, gradients and losses of ``pipe(x)`` and of steps, against the loop over the
    micro-batches, on one GPU twice, and on the GPU and the CPU."""
    here = machine.name()
    checkpoints = machine.pick(("never", "always"), ("never",))
    schedules = machine.pick(("gpipe", "1f1b", "zb_h1", "zbv"), ("1f1b",))
    with machine.deterministic():
        for name, (make, inputs) in usual(machine).items():
            x = tuple(t.to(here) for t in inputs(ROWS))
            for checkpoint in checkpoints:
                _against(report, name, make(), None, [here] * 2, x, checkpoint, schedules)
        model = blocks(2)
        x = (torch.randn(ROWS, 8, 16, 16, device=here),)
        for checkpoint in checkpoints:
            pair = [here, "cpu"]
            _against(report, "blocks", model, cut(model), pair, x, checkpoint, ("1f1b",))


def _against(
    report: Report,
    name: str,
    model: nn.Module,
    partition: list[str] | None,
    devices: list[str],
    x: tuple[Tensor, ...],
    checkpoint: str,
    schedules: tuple[str, ...],
) -> None:
    """``partition``: that of a chain, whose stages then are on these devices in the loop, too."""
    model.to(devices[0])
    twin: nn.Module = copy.deepcopy(model)
    if partition is not None and isinstance(twin, nn.Sequential):
        twin = placed(twin, devices)
    cells = {"devices": " ".join(devices), "model": name, "checkpoint": checkpoint}
    how: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": checkpoint, "loss_fn": mean_loss}
    if partition is not None:
        how["partition"] = partition
    wanted = loop(twin, x, CHUNKS)
    target = torch.randn(ROWS, device=devices[-1])
    for schedule in schedules:
        with fxpipe.compile(model, devices, schedule=schedule, **how) as pipe:
            if schedule == schedules[0]:
                model.zero_grad()
                output = pipe(*x)
                loss_of(output).backward()
                compared(report, (output, gradients(model)), wanted, run="pipe(x)", **cells)
            model.zero_grad()
            loss = pipe.step(*x, target=target)
            order = named(schedule, lanes=2, microbatches=CHUNKS, stages=len(pipe.stages))
            total, grads = step_of_loop(twin, x, target, pipe, order, CHUNKS, mean_loss)
            compared(report, (gradients(model),), (grads,), run=schedule, **cells)
            if difference(loss, total) > 1e-6:
                report.problem(f"the loss of {name} with {schedule} is {loss}, and not {total}")
            pipe.module.to(devices[0])


# ------------------------------------------------------------------------------------ marked tests

MARKED = [
    f"tests/fxpipe/runtime/{name}.py"
    for name in ("test_streams", "test_random", "checkpointing/test_surroundings")
]


def marked(machine: Machine, report: Report) -> None:
    """The tests of the repository that are skipped where there is no accelerator."""
    if find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    import pytest

    results = report.file("tests.xml")
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--junitxml={results}"]
    if not machine.is_real:
        options += ["-p", "tests.accelerator.plugin"]
    status = pytest.main([*options, *(str(ROOT / test) for test in MARKED)])
    for case in ET.parse(results).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = [child for child in case if child.tag == "skipped"]
        result = "failed" if bad else "skipped" if skipped else "passed"
        reason = (bad or skipped)[0].get("message", "") if bad or skipped else ""
        report.row(test=case.get("name"), result=result, why=reason.split("\n")[0][:90])
    if status:
        report.problem(f"pytest ended with {status!r}; what it says is in logs/marked.txt")


# ------------------------------------------------------------------------------------ waiting


def sync(machine: Machine, report: Report) -> None:
    """Warm calls in which the host must not wait for the GPU."""
    here = machine.name()
    x, target = torch.randn(8, 8, 16, 16, device=here), torch.randn(8, device=here)
    for checkpoint in ("never", "always"):
        for schedule in machine.pick(("1f1b", "zb_h1"), ("1f1b",)):
            model = blocks(2, dropout=0.1).to(here)
            how: dict[str, Any] = {"checkpoint": checkpoint, "schedule": schedule}
            how |= {"chunks": 4, "loss_fn": mean_loss, "partition": cut(model)}
            with fxpipe.compile(model, [here] * 2, **how) as pipe:
                runs = (schedule, pipe.step), ("pipe(x)", partial(_and_backward, pipe))
                for name, call in runs:
                    run = partial(call, x, target=target)
                    run()
                    run()
                    machine.synchronize()
                    said = _refused(machine, run)
                    report.row(run=name, checkpoint=checkpoint, waits=said or "no")
                    if said:
                        report.problem(f"{name}, checkpoint {checkpoint}: the host waits: {said}")


def _and_backward(pipe: fxpipe.Pipeline, x: Tensor, target: Tensor) -> None:
    mean_loss(pipe(x), target).backward()


def _refused(machine: Machine, run: Callable[[], object]) -> str:
    """What makes the host wait within a call, and where; nothing if nothing does."""
    try:
        with machine.no_synchronization():
            run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        frame, own = error.__traceback__, ""
        while frame is not None:
            code = frame.tb_frame.f_code
            if "/fxpipe/" in code.co_filename:
                own = f"{code.co_filename.split('/fxpipe/')[-1]}:{frame.tb_lineno}"
            frame = frame.tb_next
        return f"{str(error).splitlines()[0]} at {own}"
    return ""


def sanitizer(machine: Machine, report: Report) -> None:
    """A short ``pipe(x)`` and a short step, looked at by PyTorch's CUDA sanitizer, which this
    process's environment switches on. While it looks at operators, they run in the caller's
    thread; what copies and streams there are is the same."""
    for devices in ([machine.name()] * 2, machine.two):
        model = blocks(2).to(devices[0])
        x, target = torch.randn(4, 8, 8, 8), torch.randn(4)
        how: dict[str, Any] = {"chunks": 2, "schedule": "1f1b", "partition": cut(model)}
        with fxpipe.compile(model, devices, loss_fn=mean_loss, **how) as pipe:
            for _ in range(2):
                loss_of(pipe(x)).backward()
                pipe.step(x, target=target)
            machine.synchronize()
        report.row(devices=" ".join(devices), errors="none")
    if not machine.is_real:
        report.note("The simulated accelerator looks for races itself, in every part.")


SLEEP = 0.05


def sleeps(machine: Machine, report: Report) -> None:
    """Each stream in turn is made late by more than all the work takes: whatever does not wait for
    it then uses what is not there yet."""
    for devices in ([machine.name()] * 2, machine.two):
        model = blocks(2).to(devices[0])
        x = torch.randn(ROWS, 8, 16, 16)  # on the host, so that there are copies
        target = torch.randn(ROWS)
        how: dict[str, Any] = {"chunks": 4, "schedule": "1f1b", "partition": cut(model)}
        with (
            machine.deterministic(),
            fxpipe.compile(model, devices, loss_fn=mean_loss, **how) as pipe,
        ):
            run = partial(_both, pipe, x, target)
            run()
            with machine.streams_used() as streams:
                wanted = run()
            machine.synchronize()
            for (device, number), stream in streams.items():
                machine.sleep(stream, SLEEP)
                found = run()
                machine.synchronize()
                cells = {"devices": " ".join(devices), "late": f"{device} stream {number}"}
                compared(report, found, wanted, **cells)
    used = {row["late"] for row in report.outcome.rows}
    if len(used) < 2:
        report.problem("no stream was used but the default one: copies do not have their own?")


def _both(pipe: fxpipe.Pipeline, x: Tensor, target: Tensor) -> list[Any]:
    """Output, loss and gradients of a ``pipe(x)`` and a step, on the host."""
    pipe.module.zero_grad()
    output = pipe(x)
    loss_of(output).backward()
    loss = pipe.step(x, target=target)
    return host([output, loss, *gradients(pipe.module)])


def callers_streams(machine: Machine, report: Report) -> None:
    """A caller who computes on streams of their own gets what one on the default streams gets."""
    devices = machine.two
    model = blocks(2).to(devices[0])
    twin = copy.deepcopy(model)
    x = torch.randn(ROWS, 8, 16, 16)
    target = torch.randn(ROWS)
    how: dict[str, Any] = {"chunks": 4, "schedule": "1f1b", "partition": cut(model)}

    def run(model: nn.Module) -> list[Any]:
        found: list[Any] = []
        with fxpipe.compile(model, devices, loss_fn=mean_loss, **how) as pipe:
            for _ in range(machine.pick(20, 2)):
                # What the caller has just enqueued has to be waited for, and not overwritten.
                late = (x.to(machine.name(), non_blocking=True) * 2) / 2
                output = pipe(late)
                loss_of(output).backward()
                loss = pipe.step(late, target=target.to(devices[-1]))
                del late
                output, loss = output.detach() * 1, loss * 1  # used on the caller's stream
                found = [output, loss]
        return host([*found, *gradients(model)])

    with machine.deterministic():
        wanted = run(twin)
        with machine.own_streams(devices):
            found = run(model)
    compared(report, found, wanted, devices=" ".join(devices))


# ---------------------------------------------------------------------------------------- the zoo

ZOO = [
    *("FourierOperator", "NormedWeights"),
    *("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"),
    *("ViTForImageClassification", "UNet2DModel", "UNet 2D", "SwinForImageClassification"),
    *("Mixture", "NeuralODE", "Ensemble", "DomainAdversarial"),
]
"""Names of the registry, in order; the first ten whose library is installed are taken. None makes
tensors on the CPU in its forward."""


def zoo(machine: Machine, report: Report) -> None:
    """Ten models of the zoo, in train mode, against the loop on one GPU."""
    from tests.models import compare
    from tests.models.registry import entries

    known = entries()
    names = [name for name in ZOO if name in known and find_spec(known[name].library)]
    here, lanes = machine.name(), machine.all if machine.count > 1 else [machine.name()] * 4
    for name in names[: machine.pick(10, 2)]:
        entry = known[name]
        torch.manual_seed(0)
        inputs = at(compare.batch_for(entry), here)
        try:
            with machine.deterministic():
                model = compare.build(entry, True).to(here)
                plain = copy.deepcopy(model)
                with fxpipe.compile(
                    model, lanes[: machine.pick(4, 2)], chunks=compare.CHUNKS, **entry.options
                ) as pipe:
                    found = compare.run_step(
                        model, lambda pipe=pipe, x=inputs: [at(pipe(**x), here)]
                    )
                parts = list(compare.micro_batches(inputs))
                wanted = compare.run_step(
                    plain, lambda plain=plain, parts=parts: [plain(**part) for part in parts]
                )
            apart = compare.difference(_step_on_host(wanted), _step_on_host(found))
        except Exception as error:
            report.row(model=name, library=entry.library, result=type(error).__name__)
            report.problem(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        report.row(
            model=name,
            library=entry.library,
            result="same bits" if apart == 0 else "near" if apart < NEAR else "differs",
            difference=apart,
        )
        if apart >= NEAR:
            report.problem(f"{name} differs by {apart:.1e}")
    if len(names) < 10:
        report.note(f"Of {len(ZOO)} models {len(names)} are of libraries that are installed.")


def _step_on_host(step: Any) -> Any:
    """What a step of :mod:`tests.models.compare` leaves behind, on the host."""
    return type(step)(host(step.outputs), host(step.gradients), host(step.buffers))
