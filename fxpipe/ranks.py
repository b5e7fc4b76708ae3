"""A pipeline whose stages are in several processes, the ranks of a ``torch.distributed`` group.

::

    torchrun --nproc-per-node 4 train.py

    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("pp",))
    pipe = fxpipe.compile(model, mesh["pp"], schedule="1f1b", loss_fn=loss_fn, example_inputs=(x,))
    optimizer = AdamW(pipe.parameters())        # those of this rank's stages
    loss = pipe.step(x, target=y)               # on every rank, with the same batch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import Parameter

from fxpipe.compiler.brief import brief
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks.compiler import RankCompiler
from fxpipe.compiler.ranks.runner import RankRunner
from fxpipe.compiler.ranks.tensors import tensors_of_module
from fxpipe.compiler.ranks.world import Ranks
from fxpipe.compiler.runner import NotYet
from fxpipe.inspect.views import RankViews
from fxpipe.ir.tensors import tensors_of
from fxpipe.loading.initialise import Init
from fxpipe.loading.load import Source
from fxpipe.pipeline import Pipeline
from fxpipe.proxy import ModelProxy
from fxpipe.runtime.ending import call
from fxpipe.runtime.inference import without_backward
from fxpipe.schedule import Timeline


class RankPipeline(Pipeline):
    """A pipeline whose stages are spread over the ranks of a group: each rank runs some of them.

    Calls of :meth:`step`, and of the pipeline itself, are collective: every rank makes the same
    calls in the same order, with the same batch. ``parameters()``, ``buffers()`` and
    ``state_dict()`` have the tensors of this rank's stages, under the model's names. The model
    itself, ``module``, is whole on every rank, but a rank keeps only the parameters and buffers of
    its own stages up to date.
    """

    _runner: RankRunner
    _views: RankViews

    def __init__(self, model: nn.Module, options: Options, ranks: Ranks) -> None:
        if options.stage_backend is not None:
            raise NotImplementedError(
                "stage_backend is not supported for ranks: leave it out, or give a list of devices"
            )
        ModelProxy.__init__(self, model)
        runner = RankRunner(RankCompiler(model, options, ranks))
        self._set_up(runner)
        self.__dict__["_views"] = RankViews(runner)

    @property
    def generate(self) -> Callable[..., Any]:
        """Ranks do not generate: the model's ``generate`` needs the output of each call, and a
        cache, where the call is made.

        Raises AttributeError.
        """
        raise AttributeError(
            "generate() is not supported for ranks: compile the model for the devices of one "
            "process, as compile(model, devices, training=False)"
        )

    @brief
    @call
    def forward(self, *args: Any, broadcast: bool = False, **kwargs: Any) -> Any:
        """Run the model's forward. The rank of the last stage gets the output, others get None.

        Args:
            broadcast: whether all ranks get the output.

        Raises RuntimeError if gradients are enabled, since a backward from the output could not
        reach the stages of other ranks. If the pipeline is compiled with ``training=False``, it is
        a backward from the output that raises it.
        """
        if self._runner.options.training and torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline of several ranks has no backward of its own, since its output is on "
                "one of them: train with pipe.step(x, target=y), or call it under torch.no_grad()"
            )
        with torch.no_grad():
            mode, values, unrolled = self._runner.ready(args, kwargs)
        output = without_backward(
            lambda: self._runner.run_for(unrolled, values, everywhere=broadcast),
            itertools.chain(self.module.parameters(), tensors_of(values)),
        )
        is_last = self.rank == self._runner.options.placement[-1]
        return mode.traced.rebuild(output) if broadcast or is_last else None

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: Any = None,
        zero_grad: bool = False,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        """A training step, which all ranks run together; see :meth:`fxpipe.Pipeline.step`.

        A rank that does not need the values of an input, such as the target on all ranks but the
        last, may be given None in its place, or a tensor on "meta".

        Every rank gives an optimizer of its own parameters (None if it has none), and a scaler, all
        in the same state. If a gradient is inf or NaN on one rank, the optimizer is skipped on all,
        and the scale is the same on all. Of several optimizers the first ones of all ranks belong
        together, and so on.

        Every rank gets the loss, and the gradients of its own parameters. The model draws its
        random numbers from rank 0's default generator, and the other ranks draw as many from
        theirs, so that generators that are seeded alike stay alike. A loss function that draws
        random numbers draws them from the last rank's generator only.

        Raises:
            ValueError: if this rank needs the values of an input that it has not been given; the
                message says which ranks need which inputs.
                Also for a scaler without an optimizer, on a rank that has parameters.
            RankError: if the step has failed on another rank, or scalers differ between ranks.
                Afterwards the pipeline can be used again, unless a process has died.
        """
        how = {"optimizer": optimizer, "zero_grad": zero_grad, "max_grad_norm": max_grad_norm}
        how |= {"scaler": scaler, "accumulate": accumulate}
        return super().step(*args, target=target, **how, **kwargs)

    def _optimizers(
        self, optimizer: Any, scaler: Any, zero_grad: bool, max_grad_norm: float | None
    ) -> list[Any] | None:
        compiler = self._runner.compiler
        with compiler.agreement.together():
            if optimizer is None and compiler.owners and not compiler.own_parameters():
                # None can be made without parameters, and other ranks have some.
                self._check_optimizers([], scaler, zero_grad, max_grad_norm)
                return []
            if scaler is not None and optimizer is None:
                raise ValueError(
                    "a scaler is given without an optimizer: ranks that unscale their gradients "
                    "by themselves would come to different scales; give step(optimizer=) as well"
                )
            return super()._optimizers(optimizer, scaler, zero_grad, max_grad_norm)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        others: Iterable[Tensor] = (),
    ) -> Tensor:
        """Clip the gradients of all ranks by their norm, as if they were one vector: that of
        ``torch.nn.utils.clip_grad_norm_`` for the model in one process. All ranks call it.

        A weight that stages of several ranks share counts once, on the rank that has it.

        ``others``: parameters beside those of the model, such as ``loss_fn.parameters()``. Those
        that have gradients on this rank are part of the vector.
        """
        return self._runner.clip_grad_norm(max_norm, norm_type, error_if_nonfinite, others)

    def measure(self, *args: Any, **kwargs: Any) -> Timeline:
        """Run a few training steps on all ranks, and return the timeline of one of them, with a
        lane for each rank; see :meth:`fxpipe.Pipeline.measure`. All ranks call it, and each gets
        the timeline.

        The time in which a rank waits for a transfer is idle time in the timeline. The clocks of
        ranks are as far apart as a message between them takes.

        Raises NotImplementedError on an accelerator, as the times are those of the host.
        """
        if self._runner.compiler.ranks.device.type != "cpu":
            raise NotImplementedError(
                "steps of ranks are measured on the CPU only: compile the model for a list of "
                "devices"
            )
        return super().measure(*args, **kwargs)

    def report(self) -> str:
        """See :meth:`fxpipe.Pipeline.report`. After a step it also says how many transfers a step
        has between ranks."""
        said = [f"{here} to {there}: {n}" for (here, there), n in self._views.transfers().items()]
        transfers = f"\ntransfers of a step, from rank to rank: {', '.join(said)}" if said else ""
        return super().report() + transfers

    @property
    def rank(self) -> int:
        """The number of this rank in its group."""
        return self._runner.compiler.ranks.rank

    @property
    def rank_graph(self) -> fx.GraphModule:
        """The rank graph that ran last: this rank's part of the step graph, with a "transmit" node
        for each value that it sends to another rank, and a "receive" node for each that it gets.

        Raises NotYet if no call has run yet.
        """
        if self._runner.program is None:
            raise NotYet("there has been no call yet: call step()")
        return self._runner.program.graph_module

    # ------------------------------------------------------- parameters and buffers of this rank

    # By the names below, which are those of this rank's, where the model's own are of all ranks.
    parameters, buffers = nn.Module.parameters, nn.Module.buffers

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The parameters of this rank's stages, under their names in the model."""
        own = self._own("parameters")
        for name, parameter in self.module.named_parameters("", recurse, remove_duplicate):
            if name in own:
                yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's stages, under their names in the model."""
        own = self._own("buffers")
        for name, buffer in self.module.named_buffers("", recurse, remove_duplicate):
            if name in own:
                yield f"{prefix}.{name}" if prefix else name, buffer

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The entries of the model's state dict that belong to this rank's stages. Entries that no
        stage uses belong to rank 0, so that the state dicts of all ranks together are the model's.
        A parameter is in that of one rank, a buffer in that of each rank that reads it.
        """
        own = self._own("state_dict")
        found: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        for name in [name for name in found if name.removeprefix(prefix) not in own]:
            del found[name]
        return found

    def load(
        self,
        checkpoint: Source,
        *,
        strict: bool = True,
        assign: bool = False,
        init: Init | None = None,
    ) -> Any:
        """Load a checkpoint of the model: this rank reads the tensors of its own stages only, each
        straight to its device; see :meth:`fxpipe.Pipeline.load`.

        A model that was built on "meta" gets memory for this rank's tensors, and all others stay on
        "meta". Missing tensors are an error on the rank that needs them.
        """
        self._own("load")
        return super().load(checkpoint, strict=strict, assign=assign, init=init)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the whole model, or of this rank.

        Raises RuntimeError, if ``strict``, for a state dict that lacks a tensor of this rank, or
        has one that the model does not have.
        """
        self._own("load_state_dict")
        return self._runner.load(state_dict, strict=strict, assign=assign, init=None)

    def _own(self, what: str) -> set[str]:
        """The names of the parameters, buffers and state dict entries that belong to this rank.
        ``what`` names the method that asks, for the message of the error."""
        compiler = self._runner.compiler
        if not compiler.owners:
            raise NotYet(
                f"{what} depends on the stages of this rank, which are not known before the model "
                "has been cut: give example_inputs to compile()"
            )
        every = (*self.module.state_dict(), *dict(tensors_of_module(self.module)))
        return set(filter(compiler.is_own, every))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a pipeline of several ranks cannot be pickled, nor copied: save pipe.state_dict()"
        )
