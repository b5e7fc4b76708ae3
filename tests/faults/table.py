"""The table of faults: what goes wrong, at which operation, for which micro-batch; and what has to
hold after it.

After each fault the caller gets the original error, with a note that says where it was; no thread
waits or is lost; the tensors of the failed call are gone; the state of the random number generator
is that of before the call or that of after a call that does not fail; the model has no other hooks;
and, once parameters, buffers and gradients have been put back, the next call has the bits that it
would have had.
"""

from __future__ import annotations

import _thread
import faulthandler
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fxpipe
from fxpipe.ir.hooks import HOOKS
from tests.faults import model as code
from tests.faults.instrumented import instrumented

CHUNKS = 3
PATIENCE = 60  # seconds after which a call that has not come back shows all threads and ends all
DEVICES = ["cpu", "cpu", "cpu:0"]  # the first and the last stage share a parameter


class Fault(ArithmeticError):
    """An error of the user's code."""


def _raise(kind: type[BaseException]) -> Callable[[], None]:
    def fault() -> None:
        raise kind("the fault")

    return fault


def _slow() -> None:
    time.sleep(0.01)


KINDS: dict[str, tuple[Callable[[], None], type[BaseException] | None]] = {
    "exception": (_raise(Fault), Fault),
    "keyboard interrupt": (_raise(KeyboardInterrupt), KeyboardInterrupt),
    "out of memory": (_raise(torch.OutOfMemoryError), torch.OutOfMemoryError),
    "thread told to exit": (_raise(SystemExit), SystemExit),
    "caller interrupted": (_thread.interrupt_main, KeyboardInterrupt),
    "slow": (_slow, None),
}
"""By name: what happens, and what the caller gets; None if the call succeeds."""


@dataclass(frozen=True)
class Setting:
    """How a pipeline is compiled, and whether it is called or trained by steps."""

    steps: bool
    schedule: str
    checkpoint: str
    is_weighted: bool = False  # whether a function of the user's weighs the micro-batches

    def __str__(self) -> str:
        return f"{self.schedule} steps" if self.steps else f"calls, checkpoint {self.checkpoint}"


SETTINGS = (
    Setting(False, "gpipe", "never"),
    Setting(False, "gpipe", "always"),
    Setting(False, "gpipe", "offload"),
    Setting(False, "gpipe", "selective"),
    Setting(True, "1f1b", "always"),
    Setting(True, "gpipe", "offload"),
    Setting(True, "1f1b", "selective"),
    Setting(True, "zb_h1", "never", is_weighted=True),
)


@dataclass
class Injector:
    """Lets a fault happen, once, where it is armed; and notes the places that a call comes to."""

    at: tuple[str, int] | None = None
    fault: Callable[[], None] = _slow
    happened: bool = False
    met: Counter[tuple[str, int]] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)

    def node(self, place: str, microbatch: int) -> None:
        """A node of the program is about to run, or its backward."""
        self._come((place, microbatch))

    def code(self, place: str) -> None:
        """The model's own code comes to a place, for the so-manieth time in a call."""
        self.times[place] += 1
        self._come((f"{place} (nth)", self.times[place] - 1))

    def _come(self, at: tuple[str, int]) -> None:
        self.met[at] += 1
        if at == self.at and not self.happened:
            self.happened = True
            self.fault()

    def arm(self, at: tuple[str, int] | None, fault: Callable[[], None] = _slow) -> None:
        """Let the fault happen at a place, in the calls from now on."""
        self.at, self.fault, self.happened = at, fault, False
        self.times.clear()


class Subject:
    """A pipeline into which faults are injected."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.injector = setting, Injector()
        torch.manual_seed(0)
        self.model = code.Net()
        code.watch[:] = [self.injector.code]
        self.input, self.y = torch.randn(6, 4), torch.randn(6, 4)
        self.x = self.input.clone()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        with instrumented(self.injector.node):
            self.pipe = fxpipe.compile(
                self.model,
                DEVICES,
                chunks=CHUNKS,
                partition=["b", "c"],
                schedule=setting.schedule,
                checkpoint=setting.checkpoint,
                loss_fn=code.loss_fn,
                loss_weight=code.loss_weight if setting.is_weighted else None,
                deferred_batch_norm=True,
                # A later check calls the model and the loss, too, and takes what they raise for a
                # reason to check again: of a fault in there the step knows nothing.
                check=False,
            )
            self._call()
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.good, self.generators = self.again()
        self.injector.met.clear()
        self.again()
        self.places = sorted(self.injector.met)
        self.threads = threading.active_count()
        self.tensors = self.living()
        self.hooks = self._hooks()

    def _call(self) -> Tensor:
        if self.setting.steps:
            return self.pipe.step(self.x, target=self.y, optimizer=self.optimizer)
        loss = sum((output - self.y).square().mean() for output in self.pipe(self.x))
        loss.backward()
        return loss.detach()

    def reset(self) -> None:
        """Put parameters, buffers, gradients, optimizer, input and random numbers back."""
        self.injector.times.clear()
        self.x.copy_(self.input)
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        self.optimizer.state.clear()
        torch.manual_seed(7)

    def again(self) -> tuple[list[Any], list[Tensor]]:
        """A call from the start: its loss, input, gradients, parameters and buffers; and the states
        of the generator before it and after it."""
        self.reset()
        before = torch.get_rng_state()
        loss = self._call()
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        values = [value.clone() for value in self.model.state_dict().values()]
        return [loss, self.x.clone(), *grads, *values], [before, torch.get_rng_state()]

    def living(self) -> int:
        """How many tensors there are."""
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    def _hooks(self) -> list[int]:
        of_modules = [
            len(vars(m)[name] or ())
            for m in self.model.modules()
            for name in HOOKS
            if isinstance(vars(m)[name], dict)
        ]
        return of_modules + [len(p._backward_hooks or ()) for p in self.model.parameters()]

    def fails(self, at: tuple[str, int], kind: str) -> str | None:
        """Let a fault happen in a call. Returns what is wrong after it; None if nothing is."""
        fault, expected = KINDS[kind]
        self.reset()
        self.injector.arm(at, fault)
        error: BaseException | None = None
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            outcome: list[Any] | None = self.again()[0]
            time.sleep(0)  # an interrupt of the caller comes no later than here
        except BaseException as raised:
            error, outcome = raised, None
        finally:
            faulthandler.cancel_dump_traceback_later()
            happened = self.injector.happened
            self.injector.arm(None)
        if not happened:
            return "the fault has not happened"
        return self._wrong(kind, expected, error, outcome) or self._left()

    def _wrong(
        self, kind: str, expected: type[BaseException] | None, error: Any, outcome: Any
    ) -> str | None:
        if expected is None:
            if error is not None:
                return f"it raises {error!r}"
            return None if alike(outcome, self.good) else "a slow lane changes the result"
        if kind == "caller interrupted" and error is None:
            return (
                None if alike(outcome, self.good) else "it comes too late, and the result differs"
            )
        if type(error) is not expected:
            return f"the caller gets {error!r}"
        is_noted = any("in fxpipe" in note for note in getattr(error, "__notes__", ()))
        if isinstance(error, Exception) and self.setting.steps and not is_noted:
            return f"the error has no note, {getattr(error, '__notes__', None)}"
        return None

    def _left(self) -> str | None:
        """What a call has left in disorder."""
        state = torch.get_rng_state()
        if not any(torch.equal(state, each) for each in self.generators):
            return "the random number generator is in the middle of a call"
        if threading.active_count() != self.threads:
            return f"{threading.active_count()} threads run, and {self.threads} before"
        if self._hooks() != self.hooks:
            return "the model has other hooks"
        if not alike(self.again()[0], self.good):
            return "the next call is another one"
        return None


def alike(some: Any, others: Any) -> bool:
    """Whether two lists of tensors have the same bits."""
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(some, others, strict=True)
    )


def cells(subject: Subject) -> Iterator[tuple[str, int, str]]:
    """The place, the micro-batch and the kind of each fault: of each operation's micro-batches the
    first one, one in the middle and the last one."""
    numbers: dict[str, list[int]] = {}
    for place, number in subject.places:
        numbers.setdefault(place, []).append(number)
    for place, found in numbers.items():
        for number in sorted({found[0], found[len(found) // 2], found[-1]}):
            for kind in KINDS:
                yield place, number, kind
