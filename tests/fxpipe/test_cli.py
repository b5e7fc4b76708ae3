import re

import pytest
from click.testing import CliRunner

from fxpipe.cli import main


def run(*args):
    return CliRunner().invoke(main, args)


def test_help_says_what_there_is():
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "--steps" in run("demo", "-h").output


def test_wrong_arguments_are_refused_without_a_traceback():
    for args in (["demo", "--steps", "0"], ["demos"], ["demo", "--out", __file__]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Error" in result.output and "Traceback" not in result.output


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
    assert re.search("skip relu: stage 0 -> stage [23], [0-9,]+ bytes", result.output)
    for level in ("stage", "pipeline"):
        assert "<svg" in (tmp_path / "out" / f"{level}.svg").read_text()
