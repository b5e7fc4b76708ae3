"""What a rank raises when a run has failed on another rank, and how ranks tell each other."""

from __future__ import annotations


class RankError(RuntimeError):
    """A run that failed on another rank, or that ranks do not agree about."""


class LostRank(RankError):
    """Another rank has ended, or has not answered for as long as the process group waits. The ranks
    cannot go on together."""


def is_final(error: BaseException) -> bool:
    """Whether ranks cannot go on together after an error on one of them: it has lost another rank,
    or is itself about to end, as after Ctrl-C."""
    return isinstance(error, LostRank) or not isinstance(error, Exception)


def failure(name: str, error: BaseException) -> str:
    """The text by which a rank of this name tells others of an error."""
    if isinstance(error, RankError):
        return str(error)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{name} failed: {type(error).__name__}: {error}{notes}"


def reason(error: RuntimeError) -> str:
    """The first sentence of an error of the network; what follows is advice."""
    return str(error).split("\n")[0].split(". ")[0]
