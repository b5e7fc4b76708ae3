"""Agreement: what the ranks of a group tell each other ahead of a run, so that all do the same.

::

    rank 0    "plan", its fingerprint ──┐
    rank 1    "plan", its fingerprint ──┼──> every rank has what all have said
    rank 2    it has failed, and how  ──┘    (or why one of them cannot go on)

Every rank comes to the same questions in the same order. A rank that fails on the way answers the
next question with its error, so that no rank waits for another that does not come.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime.ranks.transport import RankError, failure, host_group, new_group

_SPOKEN, _FAILED = 0, 1


def apart(places: Mapping[str, str]) -> str:
    """What to say of ranks that are at different places: by the name of each where it is."""
    at = ", ".join(f"{name} at {place!r}" for name, place in places.items())
    return (
        f"the ranks have come to different places: {at}; every rank has to make the same calls of "
        "the pipeline, with arguments of the same shapes"
    )


class Agreement:
    """The questions that the ranks of a group answer together.

    All ranks of the group have to make it at the same time.

    Args:
        members: the ranks that have to agree, by their numbers in the default group, in the order
            in which answers are given.
        names: what messages call them.
        group: the group of these ranks; None: one is made.
        timeout: as for :class:`fxpipe.runtime.ranks.transport.GroupTransport`.
    """

    def __init__(
        self,
        members: Sequence[int],
        names: Sequence[str],
        group: dist.ProcessGroup | None,
        timeout: timedelta,
    ) -> None:
        self.rank, self.names = members.index(dist.get_rank()), names
        self._group = (
            host_group(group, timeout) if group is not None else new_group(members, "gloo", timeout)
        )
        places = dist.get_process_group_ranks(self._group)
        self._order = [places.index(member) for member in members]

    def ask(self, question: str, answer: Any = None) -> list[Any]:
        """Answer a question, and get the answers of all ranks, in the order of the ranks.

        Raises :class:`RankError` if a rank has failed, or is at another question.
        """
        return self._exchange(_SPOKEN, (question, answer))

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context in which an error on this rank is the answer to the other ranks' next question,
        so that they end too."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            try:
                self._exchange(_FAILED, failure(self.names[self.rank], error))
            except RankError as theirs:
                if (known := str(theirs)) != failure(self.names[self.rank], error):
                    error.add_note(f"meanwhile {known}")
            raise

    def _exchange(self, kind: int, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        heads = self._gathered(torch.tensor([kind, len(data)]))
        longest = max(int(head[1]) for head in heads)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = self._gathered(padded)
        said = [
            pickle.loads(bytes(text[: int(head[1])].tolist()))
            for head, text in zip(heads, texts, strict=True)
        ]
        for head, what in zip(heads, said, strict=True):
            if int(head[0]) == _FAILED:
                raise RankError(what)
        questions = [question for question, _ in said]
        if len(set(questions)) > 1:
            raise RankError(apart(dict(zip(self.names, questions, strict=True))))
        return [answer for _, answer in said]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in self._order]
        try:
            dist.all_gather(found, tensor, group=self._group)
        except RuntimeError as error:
            name = self.names[self.rank]
            raise RankError(f"{name} has lost another rank: {error}") from error
        return [found[place] for place in self._order]
