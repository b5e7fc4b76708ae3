"""Measured loss: where costs are measured, the loss and its backward are, too, on the first device.

::

    an output and a target as large as those of   ── loss_fn ── loss ── backward      timed
    a micro-batch, with the same number everywhere

The work that has been counted (:mod:`fxpipe.planning.loss`) then says how the time changes with the
number of rows, and from device to device. The numbers are such that every loss takes them, since a
kernel that refuses one may stop an accelerator for good: 0.5 is a probability as well as a logit,
0 is the number of a class in any case, and True keeps what a mask might leave out.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.precision import users_precision
from fxpipe.ir.structure import map_tensors
from fxpipe.ir.tensors import no_scalar, tensor_bytes, tensors_of
from fxpipe.meaning.loss_state import left_as_it_was
from fxpipe.planning.loss import ExpectedLoss, SavedByLoss, output_of
from fxpipe.runtime.ambient import without_saved_tensors_hooks
from fxpipe.runtime.random import RandomState
from fxpipe.trace.patches import prints
from passes.cost.measured import intra_op_threads
from passes.cost.timer import timer_of

ROUNDS = 5  # the most rounds after the warm-up
BUDGET_S = 2.0  # no round begins after so many seconds; a warm-up that takes longer counts itself


@dataclass(frozen=True)
class MeasuredLoss:
    """Measures a loss of which the work has been counted.

    Args:
        expected: the loss.
        rows: how many rows the output of the graph has, and how many of them a micro-batch has.
        device: where to measure.
        spec: its description.
        threads: as for :class:`~passes.cost.measured.MeasuredCost`.
    """

    expected: ExpectedLoss
    rows: tuple[int, int]
    device: torch.device
    spec: DeviceSpec
    threads: int | None = None

    @prints()
    def __call__(self, saved: SavedByLoss, graph: fx.Graph) -> SavedByLoss:
        """What is known of the loss of a model graph, with how many times as long as estimated it
        takes. Nothing of that is known of a loss that does not run on this output: its time is the
        estimated one."""
        state = RandomState([self.device])
        try:
            with (
                left_as_it_was(self.expected.function)(),
                torch.enable_grad(),
                without_saved_tensors_hooks(),
                intra_op_threads(self.threads),
                users_precision(),
            ):
                output = pytree.tree_map_only(Tensor, self._like, output_of(graph))
                taken = self._rounds(output, map_tensors(self._part, self.expected.target))
        except Exception as error:
            # The user's function may refuse numbers that no model has computed, and other things
            # may have taken the memory.
            if not (is_the_models(error) or isinstance(error, torch.OutOfMemoryError)):
                raise
            return saved
        finally:
            state.put_back()
        share = tensor_bytes(tensors_of(output)) / (saved.output_bytes or 1)
        pairs = zip(taken, saved.seconds(share, self.spec), strict=True)
        forward, backward = (seconds / guess if guess else 1.0 for seconds, guess in pairs)
        return replace(saved, slower=(forward, backward))

    def _rounds(self, output: Any, target: Any) -> tuple[float, float]:
        """The medians of the seconds that loss and backward take."""
        timer = timer_of(self.device)
        wanted = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        found: list[tuple[float, float]] = []
        end = time.perf_counter() + BUDGET_S
        for _ in range(1 + ROUNDS):
            if found and time.perf_counter() > end:
                break
            loss, forward = timer.time("loss", partial(self.expected.call, output, target))
            backward = 0.0
            if wanted and not no_scalar(loss) and loss.grad_fn is not None:
                back = partial(torch.autograd.grad, loss, wanted, allow_unused=True)
                _, backward = timer.time("backward", back)
            found.append((forward, backward))
        ahead, back = map(statistics.median, zip(*(found[1:] or found), strict=True))
        return ahead, back

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor like one of the graph's output, for one micro-batch."""
        whole, some = self.rows
        return self._of_rows(tensor, whole, some).requires_grad_(tensor.requires_grad)

    def _part(self, tensor: Tensor) -> Tensor:
        """A tensor like one of the target, for one micro-batch."""
        return self._of_rows(tensor, self.expected.rows[1] or self.rows[0], self.rows[1])

    def _of_rows(self, tensor: Tensor, whole: int, some: int) -> Tensor:
        """A tensor like this one, but with ``some`` rows if it has the ``whole`` mini-batch's."""
        is_whole = tensor.ndim and len(tensor) == whole
        shape = (some, *tensor.shape[1:]) if is_whole else tensor.shape
        has_fractions = tensor.is_floating_point() or tensor.is_complex()
        number = 0.5 if has_fractions else tensor.dtype is torch.bool
        return torch.full(shape, number, dtype=tensor.dtype, device=self.device)
