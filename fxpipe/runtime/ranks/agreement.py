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
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.runtime.ranks.alarm import Alarm
from fxpipe.runtime.ranks.errors import LostRank, RankError, failure, reason
from fxpipe.runtime.ranks.groups import new_group

_SPOKEN, _FAILED = 0, 1
_SHORT = 512  # bytes that travel at once; what is longer travels in a second message
_HEAD = struct.Struct("qq")  # the kind of an answer, and its length


def apart(places: Mapping[str, str]) -> str:
    """What to say of ranks that are at different places: by the name of each where it is."""
    at = ", ".join(f"{name} at {place!r}" for name, place in places.items())
    why = ""
    if all(place in _OF_COMPILING or place.startswith(RUN) for place in places.values()):
        why = (
            ". They have been called in different ways: is one of them in another mode than the "
            "others (train or eval, autocast, without gradients)? Where replicas have batches of "
            "other lengths, give compile() dynamic=True; where one has fewer rows than there are "
            "micro-batches, leave that batch out, as drop_last=True of a loader does"
        )
    return (
        f"the ranks have come to different places: {at}; every rank has to make the same calls of "
        f"the pipeline, with arguments of the same shapes{why}"
    )


RUN = "run of "  #: the beginning of the text that stands for a run of a program
_OF_COMPILING = "examples", "values of examples", "plan", "cut", "choice"


class Agreement:
    """The questions that the ranks of a group answer together.

    All ranks of the group have to make it at the same time.

    Args:
        members: the ranks that have to agree, by their numbers in the default group, in the order
            in which answers are given.
        names: what messages call them.
        known: groups that connect these ranks: the group of them all, or those of the dimensions of
            a mesh of them, one after the other.
        device: where this rank computes.
        timeout: as for :class:`fxpipe.runtime.ranks.transport.GroupTransport`.
    """

    def __init__(
        self,
        members: Sequence[int],
        names: Sequence[str],
        known: Sequence[dist.ProcessGroup],
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.rank, self.names = members.index(dist.get_rank()), names
        self._group = (
            known[0]
            if len(known) == 1 and dist.get_backend(known[0]) == "gloo"
            else new_group(members, "gloo", timeout, known, device)
        )
        places = dist.get_process_group_ranks(self._group)
        self._order = [places.index(member) for member in members]
        self.alarm = Alarm(self.rank, len(members))
        self.alarm.name = self.ask("name", uuid.uuid4().hex)[0]

    def ask(self, question: str, answer: Any = None) -> list[Any]:
        """Answer a question, and get the answers of all ranks, in the order of the ranks.

        Raises :class:`RankError` if a rank has failed, or is at another question.
        """
        return self._exchange(_SPOKEN, (question, answer))

    def fail(self, error: BaseException) -> None:
        """Answer the next question with an error of this rank, or one that it has been told of.
        After it has lost another rank, it answers nothing."""
        text = failure(self.names[self.rank], error)
        try:
            if not isinstance(error, LostRank):
                self._exchange(_FAILED, text)
        except RankError as theirs:
            if (known := str(theirs)) != text:
                error.add_note(f"meanwhile {known}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context in which an error on this rank is the answer to the other ranks' next question,
        so that they end too."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _exchange(self, kind: int, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        heads, said = self._gathered(kind, data)
        for head, what in zip(heads, said, strict=True):
            if head == _FAILED:
                raise RankError(what)
        questions = [question for question, _ in said]
        if len(set(questions)) > 1:
            raise RankError(apart(dict(zip(self.names, questions, strict=True))))
        return [answer for _, answer in said]

    def _gathered(self, kind: int, data: bytes) -> tuple[list[int], list[Any]]:
        """The kinds of all ranks' answers, and the answers."""
        try:
            every = self._every(kind, data)
        except RankError:
            raise
        except RuntimeError as error:
            raise LostRank(self._lost(error)) from error
        return [head for head, _ in every], [pickle.loads(each) for _, each in every]

    def _lost(self, error: RuntimeError) -> str:
        """What to say when another rank does not answer."""
        missing = [self.names[rank] for rank in self.alarm.missing()]
        said = f"{self.names[self.rank]} has lost {' or '.join(missing) or 'another rank'}"
        said = f"{said} between two transfers ({reason(error)})"
        cause = self.alarm.heard()
        return f"{cause}; {said}" if cause else said

    def _every(self, kind: int, data: bytes) -> list[tuple[int, bytes]]:
        """The kinds and the pickles of all ranks' answers."""
        short = _HEAD.pack(kind, len(data)) + data[:_SHORT]
        found = self._gather(short, _HEAD.size + _SHORT)
        heads = [_HEAD.unpack_from(each) for each in found]
        left = max(length for _, length in heads) - _SHORT
        texts = [each[_HEAD.size :] for each in found]
        if left > 0:
            rest = self._gather(data[_SHORT:], left)
            texts = [begin + end for begin, end in zip(texts, rest, strict=True)]
        return [(kind, text[:length]) for (kind, length), text in zip(heads, texts, strict=True)]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """What all ranks give, each filled up to a number of bytes."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in self._order]
        self.alarm.wait_for(dist.all_gather(found, own, group=self._group, async_op=True))
        return [found[place].numpy().tobytes() for place in self._order]

    def close(self) -> None:
        """End the thread that talks to the store."""
        self.alarm.close()
