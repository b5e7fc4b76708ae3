"""Run a command as a user would, and say what came of it."""

from click.testing import CliRunner, Result

from fxpipe.cli import main


def run(*args: object) -> Result:
    """Of ``fxpipe`` with these arguments."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


def refused(*args: object) -> str:
    """The message of a command that is refused as the user's error."""
    result = run(*args)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert "Error: " in result.stderr and "Traceback" not in result.output
    return result.stderr.partition("Error: ")[2].strip()
