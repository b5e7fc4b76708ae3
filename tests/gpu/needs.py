"""Which packages and programs the kit needs. This file imports the standard library only."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

REQUIRED = "torch", "numpy", "networkx", "graphviz", "rich", "click"
"""The dependencies of fxpipe, as ``pyproject.toml`` has them: nothing runs without these."""

OPTIONAL = {
    "pytest": "the tests that need an accelerator do not run",
    "transformers": "five models of the zoo are left out, and GPT-2 is the kit's own",
    "diffusers": "its U-Net is left out of the zoo",
    "monai": "its U-Net is left out of the zoo",
    "triton": "neither the Triton stage nor compiled stages run on a GPU",
    "torchgpipe": "nothing is measured beside torchgpipe",
}
"""What the kit does not do where a package is missing."""

PROGRAMS = {
    "nvidia-smi": "the driver's version is not known",
    "gcc": "Triton cannot build its launchers",
    "g++": "neither the simulated accelerator nor inductor's code for the CPU can be built",
}
"""What the kit does not do where a program is missing."""


def missing() -> list[str]:
    """A line for each thing without which nothing runs: the Python, and packages."""
    lines = []
    if sys.version_info < (3, 11):  # noqa: UP036 - a machine may have anything
        lines.append(f"Python is {sys.version.split()[0]}: 3.11 or later is needed.")
    packages = [name for name in REQUIRED if find_spec(name) is None]
    if packages:
        lines.append(
            f"Packages are missing: {', '.join(packages)}. Without a network, bring wheels: "
            f"`pip download --no-deps -d wheels {' '.join(packages)}` elsewhere, and here "
            "`pip install --no-index --no-deps --target site wheels/*.whl` and "
            "`export PYTHONPATH=site`."
        )
    return lines


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_program(name: str) -> bool:
    """Whether a program is on the path."""
    return shutil.which(name) is not None
