import re
import subprocess
import sys

import pytest

import fxpipe
from tests.fxpipe.cli.invoke import refused, run

COMMANDS = ["bench", "compile", "demo", "explain", "passes", "plan", "schedule"]


def test_help_says_what_there_is():
    result = run("--help")
    assert result.exit_code == 0
    listed = result.output.partition("Commands:")[2]
    assert re.findall(r"^  (\w+)  +\w", listed, re.M) == COMMANDS
    assert "..." not in listed, "each says it in one line"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(command):
    result = run(command, "-h")
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\s+(python -m )?fxpipe {command}", result.output)


def test_help_needs_no_torch():
    code = "import sys, fxpipe.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_said():
    assert run("--version").output == f"fxpipe, version {fxpipe.__version__}\n"


def test_wrong_arguments_are_refused_without_a_traceback():
    for args in (["demo", "--steps", "0"], ["demos"], ["demo", "--out", __file__]):
        refused(*args)
    assert "Not a directory" in refused("demo", "--out", f"{__file__}/out")


def test_a_traceback_is_shown_if_asked_for(models):
    assert "own_models.py, line" in refused("compile", "own_models:fails")
    result = run("--traceback", "compile", "own_models:fails")
    assert isinstance(result.exception, ZeroDivisionError)
    result = run("--traceback", "schedule", "zbv", "--lanes", 2, "--stages", 3)
    assert isinstance(result.exception, ValueError)


def test_the_demo_trains_compares_reports_and_draws(tmp_path):
    pytest.importorskip("sklearn")
    result = run("demo", "--steps", "12", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    losses = dict(
        (name, (float(before), float(after)))
        for name, before, after in re.findall(r"(\w+) +loss ([\d.]+) -> ([\d.]+)", result.output)
    )
    assert set(losses) == {"pipelined", "unpipelined"}
    for before, after in losses.values():
        assert after < before
    (difference,) = re.findall(r"largest difference of the 12 losses: (\S+)", result.output)
    assert float(difference) < 1e-4
    assert re.search("skip relu: stage 0 -> stage [23], [\\d.]+ [KM]iB", result.output)
    for level in ("stage", "pipeline"):
        assert "<svg" in (tmp_path / "out" / f"{level}.svg").read_text()
    assert "UNet on 4 stages" in (tmp_path / "out" / "report.html").read_text()
    assert "\u2501" * 9 not in result.output.partition("stages")[0], "no bars: this is no terminal"
