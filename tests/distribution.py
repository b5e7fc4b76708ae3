"""Install what ``make wheel`` has built in empty environments.

For the Python that runs ``python -m tests.distribution dist``, the wheel is installed with all that
it depends on, and a pipeline is compiled, trained and drawn with nothing else on the PATH. For each
other Python from 3.11 on that is found, the wheel and the source distribution are installed without
PyTorch, whose wheels for the CPU are not published for all of them: every file is compiled, and the
command line says its version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fxpipe

ROOT = Path(__file__).parent.parent
MINORS = range(11, 15)

USE = """
import torch, fxpipe
from fxpipe.inspect.draw import render_svg
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=2)
pipe(torch.randn(4, 4)).sum().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
assert "</svg>" in render_svg(pipe.draw())
print("draws")
"""


def parts(wheel: Path) -> set[str]:
    """The folders at the top of a wheel; none holds tests."""
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    tests = [name for name in names if any(part.startswith("test") for part in name.parts)]
    assert tests == [], f"tests in {wheel.name}: {tests}"
    return {name.parts[0] for name in names}


def pythons() -> Iterator[Path]:
    """One interpreter for each version of Python that is found, beside the one that runs this."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    for minor in MINORS:
        if minor == sys.version_info.minor:
            continue
        candidates = [folder / f"python3.{minor}" for folder in folders]
        candidates += sorted(home.glob(f"3.{minor}.*/bin/python"))
        yield from [python for python in candidates if _is_version(python, minor)][:1]


def _is_version(python: Path, minor: int) -> bool:
    """Whether a program is Python of that version: a shim may be there for one that is not."""
    if not os.access(python, os.X_OK):
        return False
    said = subprocess.run([python, "--version"], capture_output=True, text=True)
    return said.returncode == 0 and said.stdout.startswith(f"Python 3.{minor}.")


class Environment:
    """An empty virtual environment, used outside of the checkout, and with nothing on PATH."""

    def __init__(self, python: Path | str, folder: Path) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", folder], check=True)

    def run(self, program: str, *args: str | Path) -> str:
        environ = {k: v for k, v in os.environ.items() if k not in ("PATH", "PYTHONPATH")}
        command = [self.folder / "bin" / program, *args]
        return subprocess.run(
            command, check=True, cwd=self.folder, env=environ, stdout=subprocess.PIPE, text=True
        ).stdout

    def install(self, *args: str | Path) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *args)


def main(dist: Path) -> None:
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    information = f"fxpipe-{fxpipe.__version__}.dist-info"
    assert parts(wheel) == {"fxpipe", "passes", information}, parts(wheel)
    print(f"{wheel.name} holds fxpipe and passes, and no tests")
    with tempfile.TemporaryDirectory() as folder:
        full = Environment(sys.executable, Path(folder, "full"))
        full.install(wheel, "--constraint", ROOT / "constraints.txt")
        print(f"{sys.version.split()[0]}: {full.run('fxpipe', '--version').strip()},", end=" ")
        print(full.run("python", "-c", USE).strip())
        for python in pythons():
            small = Environment(python, Path(folder, python.parts[-3]))
            small.install("click", "rich")  # of what fxpipe depends on, the command line's part
            for built in (wheel, source):
                small.install(built, "--no-deps", "--force-reinstall")
                small.run("python", "-m", "compileall", "-q", "lib")
                said = small.run("fxpipe", "--version").strip()
                print(f"{python}: {said} from {built.name}, files compile")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
