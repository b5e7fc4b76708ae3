"""A pipeline whose stages are in several processes, the ranks of a ``torch.distributed`` group.

::

    torchrun --nproc-per-node 4 train.py

    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("pp",))
    pipe = fxpipe.compile(model, mesh["pp"], schedule="1f1b", loss_fn=loss_fn, example_inputs=(x,))
    optimizer = AdamW(pipe.parameters())        # those of this rank's stages
    loss = pipe.step(x, target=y)               # on every rank, with the same batch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import Parameter

from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks import RankCompiler, RankRunner, Ranks, tensors_of_module
from fxpipe.compiler.runner import NotYet
from fxpipe.pipeline import Pipeline
from fxpipe.proxy import ModelProxy
from fxpipe.schedule import Timeline


class RankPipeline(Pipeline):
    """A model of which this process runs some stages, and the other ranks of a group the others.

    Every rank calls :meth:`step`, and the pipeline itself, at the same time and with the same
    batch. Parameters, buffers and the state dict are those of this rank's stages, under the model's
    names. The model itself, ``module``, is whole on every rank, but only the parameters and buffers
    of a rank's own stages are kept up to date there.
    """

    _runner: RankRunner

    def __init__(self, model: nn.Module, options: Options, ranks: Ranks) -> None:
        if options.stage_backend is not None:
            raise NotImplementedError(
                "stages of ranks are not compiled: leave stage_backend out, or give a list of "
                "devices"
            )
        ModelProxy.__init__(self, model)
        self._set_up(RankRunner(RankCompiler(model, options, ranks)))

    def forward(self, *args: Any, broadcast: bool = False, **kwargs: Any) -> Any:
        """The model's output, on the rank of the last stage; None on the other ranks.

        Args:
            broadcast: whether all ranks get the output.

        Raises RuntimeError where gradients are recorded: they would end at this process.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline of several ranks has no backward of its own, since its output is on "
                "one of them: train with pipe.step(x, target=y), or call it under torch.no_grad()"
            )
        mode, values, unrolled = self._runner.ready(args, kwargs)
        output = self._runner.run_for(unrolled, values, everywhere=broadcast)
        is_last = self.rank == self._runner.options.placement[-1]
        return mode.traced.rebuild(output) if broadcast or is_last else None

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """A training step, which all ranks make together; see :meth:`fxpipe.Pipeline.step`.

        All ranks get the loss, and each the gradients of its own parameters. The random numbers of
        the model are those of rank 0's default generator; a loss that draws some uses the last
        rank's.

        Raises:
            NotImplementedError: for a scaler, whose ranks would come to different scales.
            RankError: if the step has failed on another rank. Afterwards the pipeline can be used
                again, if no rank has been lost.
        """
        if scaler is not None:
            raise NotImplementedError(
                "a scaler would skip steps on one rank and not on another: train in bfloat16, "
                "which needs none"
            )
        return super().step(*args, target=target, optimizer=optimizer, **kwargs)

    def measure(self, *args: Any, **kwargs: Any) -> Timeline:
        """Not there for ranks: raises NotImplementedError."""
        raise NotImplementedError(
            "steps are measured in one process only: compile the model for a list of devices"
        )

    @property
    def rank(self) -> int:
        """The number of this rank in its group."""
        return self._runner.compiler.ranks.rank

    @property
    def rank_graph(self) -> fx.GraphModule:
        """The graph that this rank has run last: its own part of the step graph, with a "transmit"
        or a "receive" for all that goes to other ranks or comes from them."""
        if self._runner.program is None:
            raise NotYet("there has been no call yet: call step()")
        return self._runner.program.graph_module

    # ------------------------------------------------------------------------- what this rank has

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
        """The part of the model's state dict that is of this rank's stages. What no stage uses is
        rank 0's, so that those of all ranks make up the model's."""
        own = self._own("state_dict")
        found: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        for name in [name for name in found if name.removeprefix(prefix) not in own]:
            del found[name]
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the model, or of this rank.

        Raises RuntimeError, if ``strict``, where a tensor of this rank is missing, or where there
        is one that the model has not.
        """
        own = self._own("load_state_dict")
        result = self.module.load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if name in own]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"the state dict lacks {missing} of rank {self.rank}, and has "
                f"{result.unexpected_keys}, which the model has not"
            )
        return result

    def _own(self, what: str) -> set[str]:
        """The names in the model of what this rank has."""
        owners = self._runner.compiler.owners
        if not owners:
            raise NotYet(
                f"{what} are those of this rank's stages, which are not known before the model has "
                "been cut: give example_inputs to compile()"
            )
        every = (*owners, *self.module.state_dict(), *dict(tensors_of_module(self.module)))
        return {name for name in every if owners.get(name, 0) == self.rank}

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a pipeline of several ranks cannot be pickled, nor copied: save pipe.state_dict()"
        )
