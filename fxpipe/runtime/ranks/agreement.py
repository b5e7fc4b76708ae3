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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime.ranks.transport import RankError, failure, host_group

_SPOKEN, _FAILED = 0, 1


class Agreement:
    """The questions that the ranks of a group answer together.

    All ranks of the group have to make it at the same time.

    Args:
        group: the ranks that have to agree.
        timeout: as for :class:`fxpipe.runtime.ranks.transport.GroupTransport`.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = host_group(group, timeout)

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
                self._exchange(_FAILED, failure(self.rank, error))
            except RankError as theirs:
                if (known := str(theirs)) != failure(self.rank, error):
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
            at = ", ".join(f"rank {rank} at {each!r}" for rank, each in enumerate(questions))
            raise RankError(
                f"the ranks have come to different places: {at}; every rank has to make the same "
                "calls of the pipeline, with arguments of the same shapes"
            )
        return [answer for _, answer in said]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(found, tensor, group=self._group)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} has lost another rank: {error}") from error
        return found
