"""The part "about": which machine this is, and which packages and programs it lacks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import torch

from tests.gpu.machine import Machine
from tests.gpu.needs import OPTIONAL, PROGRAMS, REQUIRED, has_program, installed
from tests.gpu.part import Report


def about(machine: Machine, report: Report) -> None:
    """Versions, devices, and what is missing with what that means for the other parts."""
    report.row(what="python", value=f"{sys.version.split()[0]} at {sys.executable}")
    report.row(what="system", value=platform.platform())
    report.row(what="cores", value=os.cpu_count())
    for package in (*REQUIRED, *OPTIONAL):
        report.row(what=package, value=installed(package) or "not installed")
    report.row(what="CUDA of torch", value=torch.version.cuda)
    if machine.is_real:
        _devices(report)
    else:
        report.row(what="devices", value=f"{machine.count} of the simulated accelerator")
    for package, consequence in OPTIONAL.items():
        if installed(package) is None:
            report.note(f"{package} is not installed: {consequence}.")
    for program, consequence in PROGRAMS.items():
        if not has_program(program):
            report.note(f"{program} is not there: {consequence}.")


def _devices(report: Report) -> None:
    report.row(what="cuDNN", value=torch.backends.cudnn.version())
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        gib, capability = device.total_memory / 2**30, f"{device.major}.{device.minor}"
        text = f"{device.name}, {gib:.1f} GiB, {capability}, {device.multi_processor_count} SMs"
        report.row(what=f"cuda:{index}", value=text)
        free, _ = torch.cuda.mem_get_info(index)
        report.row(what=f"cuda:{index} free", value=f"{free / 2**30:.1f} GiB")
    for command in (
        ["nvidia-smi", "--query-gpu=index,driver_version,clocks.sm,power.limit", "--format=csv"],
        ["nvidia-smi", "topo", "-m"],
    ):
        if has_program(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            report.note(done.stdout.strip() or done.stderr.strip())
