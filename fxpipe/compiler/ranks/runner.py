"""The runner of one rank: before each call all ranks say that they are ready for the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe import ops
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.ranks.compiler import RankCompiler
from fxpipe.compiler.ranks.lowering import RankProgram, RankUnrolled
from fxpipe.compiler.runner import Runner
from fxpipe.ir._torch import infs_found
from fxpipe.ir.tensors import is_in_parts, whole
from fxpipe.loading.initialise import Init
from fxpipe.loading.load import Source, load, materialize
from fxpipe.runtime.clock import Mark, Record
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.ranks.agreement import RUN, apart
from fxpipe.runtime.ranks.errors import RankError, failure, is_final
from fxpipe.runtime.ranks.expected import Sizes
from fxpipe.runtime.ranks.replicas import Gradients
from fxpipe.runtime.ranks.transport import Edge

_MANY = 256  # kinds of runs whose sizes are remembered
_FIRST, _EVERY = 4, 64
"""The values that ranks have been given are compared in the first ``_FIRST`` runs, and later in
each run whose number is a multiple of ``_EVERY``."""


class RankRunner(Runner):
    """Runs the programs of this rank, at the same time as the other ranks run theirs."""

    compiler: RankCompiler
    calls_are_trained = False

    def __init__(self, compiler: RankCompiler) -> None:
        super().__init__(compiler)
        self.program: RankProgram | None = None  # the program that has run last
        self._sizes: dict[str, tuple[dict[Edge, list[Sizes | None]], str]] = {}
        self._runs = 0  # how many runs there have been, by which values are compared
        self._failed = ""  # how a run has failed after which the ranks cannot go on together

    def _check_open(self) -> None:
        super()._check_open()
        if self._failed:
            raise RankError(
                f"an earlier run has failed ({self._failed}), after which the ranks cannot go on "
                "together: start the processes again"
            )

    def ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any], Unrolled]:
        self._check_open()
        with self.compiler.agreement.together():
            args, kwargs, _ = self._completed(args, kwargs, None)
            return super().ready(args, kwargs)

    def ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
        self._check_open()
        with self.compiler.agreement.together():
            args, kwargs, target = self._completed(args, kwargs, target)
            return super().ready_to_step(args, kwargs, target)

    def _completed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments of a call, with tensors of the right shapes for those that this rank has
        not been given (see :mod:`fxpipe.compiler.absent`)."""
        given = {f"argument {i}": value for i, value in enumerate(args)}
        named = {f"argument {name!r}": name for name in kwargs}
        given |= {path: kwargs[name] for path, name in named.items()} | {"target": target}
        found = self.compiler.absent.completed(given, self.compiler.ranks.this_replica)
        return (
            tuple(found[f"argument {i}"] for i in range(len(args))),
            {name: found[path] for path, name in named.items()},
            found["target"],
        )

    def run(self, unrolled: Unrolled, values: list[Any], record: Record | None = None) -> Any:
        """Run this rank's program, in which every rank gets the output.

        ``record`` gets the times of all ranks. They count from when the ranks have agreed to run,
        which is the same moment on all of them, give or take the time of a message.
        """
        if record is None:
            return self.run_for(unrolled, values, everywhere=True)
        own = Record()
        result = self.run_for(unrolled, values, everywhere=True, record=own)
        taken = [(mark.node.name, mark.start, mark.end) for mark in own.marks]
        answers = self.compiler.agreement.ask("times of a run", taken)
        nodes = {node.name: node for node in unrolled.graph_module.graph.nodes}
        for rank, every in enumerate(answers[self.compiler.ranks.this_replica]):
            record.add(
                Mark(rank, nodes[name], start, end) for name, start, end in every if name in nodes
            )
        return result

    def run_for(
        self,
        unrolled: Unrolled,
        values: list[Any],
        everywhere: bool,
        record: Record | None = None,
    ) -> Any:
        """Run this rank's program. Unless the output is for all ranks, it is None on all but the
        last. ``record`` gets the times of this rank."""
        assert isinstance(unrolled, RankUnrolled)
        compiler = self.compiler
        if compiler.homes:
            return super().run(unrolled, values)  # raises, as the model has no values yet
        mine = unrolled.programs[everywhere]
        kind, sizes = self._agree(unrolled, values, everywhere)
        self.program = mine
        absent = compiler.absent
        values = [value.to("meta") if absent.is_ghost(value) else value for value in values]
        given = [compiler.transport, *values]
        if unrolled.is_reduced:
            given.append(self._gradients())
        if unrolled.is_sharded:
            given.append(compiler.shards)
        program = partial(run_inline, mine.program, given, record)
        if record is not None:
            record.begin([])
        return self._together(lambda: compiler.transport.run(program, mine.plan, 0, kind, sizes))

    def _gradients(self) -> Gradients:
        compiler = self.compiler
        assert compiler.replicas is not None
        own = compiler.own_parameters().values()
        if compiler.shards is None:
            return Gradients(compiler.replicas, own)
        shards, ids = compiler.shards, compiler.shards.ids
        return Gradients(
            compiler.replicas, (p for p in own if id(p) not in ids), lambda: shards.ids
        )

    def _together(self, run: Callable[[], Any]) -> Any:
        """Run a program, and return when all ranks have run theirs, so that no rank goes on with a
        step that another one has to do again. If the program fails on one rank, all ranks raise an
        error.

        The pipeline cannot be used again after a rank has been lost or interrupted, or after an
        error of replicas or parts, of which some may have begun sums that others have not.
        """
        compiler, agreement = self.compiler, self.compiler.agreement
        compiler.alarm.begin()
        try:
            result = run()
        except BaseException as error:
            if compiler.ranks.is_alone and not is_final(error):
                agreement.fail(error)
            else:
                self._failed = failure(agreement.names[agreement.rank], error)
                compiler.alarm.ring(self._failed, is_final=True)
            raise
        try:
            agreement.ask("end of a run")
        except RankError as error:
            if not compiler.ranks.is_alone or is_final(error):
                self._failed = str(error)
            raise
        return result

    def _agree(
        self, unrolled: RankUnrolled, values: list[Any], everywhere: bool
    ) -> tuple[str, dict[Edge, list[Sizes | None]]]:
        """Raise :class:`RankError` unless all ranks are about to run the same graph, those of this
        replica with values of the same shapes, and all parts with the same random numbers.

        Returns a text that stands for the graph and these shapes, and the sizes of the transfers
        that follow from them.
        """
        agreement, ranks = self.compiler.agreement, self.compiler.ranks
        members = ranks.this_replica if ranks.parts is None else slice(None)
        run = f"{RUN}{unrolled.digest}, {everywhere}"
        with agreement.together():
            self._refuse_absent(unrolled, values)
            text = f"{run}, with {_shapes(values)}"
            sizes, digest = self._sizes_of(text, unrolled, values, everywhere)
            said = text, self._drawn_from(unrolled), digest, self._given(unrolled, values)
            answers = agreement.ask(run, said)[members]
        texts: list[str] = [text for text, *_ in answers]
        if len(set(texts)) > 1:
            raise RankError(apart(dict(zip(agreement.names[members], texts, strict=True))))
        others = zip(agreement.names[members], answers, strict=True)
        if differing := [name for name, (_, _, theirs, _) in others if theirs != digest]:
            raise RankError(
                f"{agreement.names[agreement.rank]} and {differing[0]} have traced the model with "
                "other shapes or dtypes of the tensors between stages: run the same versions of "
                "the model and of PyTorch on all ranks"
            )
        self._refuse_others(unrolled, dict(zip(agreement.names[members], answers, strict=True)))
        if len({state for _, state, *_ in answers if state}) > 1:
            raise RankError(
                "the ranks that have parts of the same parameters would draw different random "
                "numbers, for dropout say: call torch.manual_seed with the same number on all ranks"
            )
        return text, sizes

    def _sizes_of(
        self, text: str, unrolled: RankUnrolled, values: list[Any], everywhere: bool
    ) -> tuple[dict[Edge, list[Sizes | None]], str]:
        """The sizes of all transfers in a run, and a digest of them; remembered by a text that
        stands for the graph and the shapes of the inputs."""
        if text not in self._sizes:
            sizes = unrolled.sizes(values, everywhere)
            self._sizes[text] = sizes, hashlib.sha256(repr(sizes).encode()).hexdigest()
            if len(self._sizes) > _MANY:
                del self._sizes[next(iter(self._sizes))]
        return self._sizes[text]

    def _drawn_from(self, unrolled: RankUnrolled) -> str:
        """Where other parts draw seeds, too: what those of this run depend on, which is the state
        of the default generator. Empty on ranks that draw none."""
        ranks = self.compiler.ranks
        seeds = unrolled.graph_module.graph.find_nodes(op="call_function", target=ops.seeds)
        if ranks.parts is None or ranks.rank or not seeds:
            return ""
        return hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()

    def _given(self, unrolled: RankUnrolled, values: list[Any]) -> dict[str, str]:
        """By the name of an input: a digest of the values that this rank has been given. Empty in
        most runs, since on an accelerator the host has to wait for the values."""
        self._runs += 1
        if self._runs > _FIRST and self._runs % _EVERY:
            return {}
        absent = self.compiler.absent
        return {
            name: _digest(value)
            for name, value in zip(unrolled.needs, values, strict=False)
            if isinstance(value, Tensor) and not value.is_meta and not absent.is_ghost(value)
        }

    def _refuse_others(self, unrolled: RankUnrolled, answers: dict[str, Any]) -> None:
        """Raise :class:`RankError` if ranks have been given other values of an input."""
        for name, ranks in unrolled.needs.items():
            given = {
                rank: digests[name] for rank, (*_, digests) in answers.items() if name in digests
            }
            first = next(iter(given), "")
            other = next((rank for rank in given if given[rank] != given[first]), None)
            if other is not None:
                needed = ", ".join(f"rank {rank}" for rank in ranks) or "no rank"
                raise RankError(
                    f"{first} and {other} have been given other values of {name!r}: all ranks of a "
                    "pipeline take the same batch, as from one sampler with one seed (with "
                    'replicas, a sampler over the dimension "dp" of the mesh). A rank that does '
                    f"not need the values may be given None; those of {name!r} are needed by "
                    f"{needed}"
                )

    def _refuse_absent(self, unrolled: RankUnrolled, values: list[Any]) -> None:
        """Raise ValueError if this rank needs the values of an input that it has not been given."""
        compiler, needs = self.compiler, unrolled.needs
        for name, value in zip(needs, values, strict=False):
            if compiler.ranks.rank in needs[name] and compiler.absent.is_ghost(value):
                said = "; ".join(
                    f"{each}: {', '.join(f'rank {rank}' for rank in ranks) or 'no rank'}"
                    for each, ranks in needs.items()
                )
                raise ValueError(
                    f"rank {compiler.ranks.rank} has been given no values for {name!r}, which it "
                    f"needs. The inputs are needed by these ranks: {said}"
                )

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        others: Iterable[Tensor] = (),
    ) -> Tensor:
        """Clip the gradients of this rank's parameters by the norm of those of all ranks; see
        :meth:`fxpipe.ranks.RankPipeline.clip_grad_norm_`."""
        compiler, ranks = self.compiler, self.compiler.ranks
        own: dict[Any, Tensor] = dict(compiler.own_parameters())
        models = {id(parameter) for parameter in compiler.model.parameters()}
        beside = [each for each in dict.fromkeys(others) if id(each) not in models]
        own |= {(ranks.rank, i): parameter for i, parameter in enumerate(beside)}
        norms = {
            name: whole(torch.linalg.vector_norm(parameter.grad, norm_type)).cpu()
            for name, parameter in own.items()
            if parameter.grad is not None
        }
        answers = compiler.agreement.ask("clip_grad_norm_", norms)[ranks.this_replica]
        every = {name: norm for answer in answers for name, norm in answer.items()}
        names: list[Any] = [n for n, _ in compiler.model.named_parameters() if n in every]
        names += sorted(name for name in every if isinstance(name, tuple))
        total = torch.tensor(0.0)
        if names:  # in the order, and so with the bits, of the model in one process
            first = every[names[0]]
            total = torch.linalg.vector_norm(
                torch.stack([every[name].to(first.dtype) for name in names]), norm_type
            )
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of the gradients of all ranks is {total.item()}: they are not clipped; "
                "give error_if_nonfinite=False to scale them by it nevertheless"
            )
        for is_sharded in (True, False):  # a kernel for a list of gradients does not take both
            kind = [p for p in own.values() if is_in_parts(p.grad) == is_sharded]
            nn.utils.clip_grads_with_norm_(kind, max_norm, total.to(ranks.device))
        return total.to(ranks.device)

    def unscale(self, stepping: Stepping, scaler: GradScaler) -> None:
        """Divide the gradients of this rank by a scaler's scale. If some of them are inf or NaN on
        any rank, all ranks' scalers take note of it.

        Raises RankError if the scalers are in different states, or ranks have different numbers of
        optimizers, before any of them has stepped.
        """
        agreement, device = self.compiler.agreement, self.compiler.ranks.device
        with agreement.together():
            stepping.unscale(scaler)
        noted = [infs_found(scaler, each) for each in stepping.optimizers]
        own = [any(float(value) for value in each.values()) for each in noted]
        answers = agreement.ask("unscale_", (scaler.state_dict(), own))
        states = {
            name: str(state) for name, (state, _) in zip(agreement.names, answers, strict=True)
        }
        if len(set(states.values())) > 1:
            said = ", ".join(f"{name} has {state}" for name, state in states.items())
            raise RankError(f"the scalers of the ranks are in different states: {said}")
        numbers = {len(found) for _, found in answers if found}
        if len(numbers) > 1:
            raise RankError(
                f"ranks have given {sorted(numbers)} optimizers: give the same number on all, of "
                "which a scaler skips the first ones of all ranks together, and so on"
            )
        every = [any(each) for each in zip(*(found for _, found in answers if found), strict=True)]
        if not noted:  # nothing is stepped on this rank, but its scaler counts this step, too
            noted, every = [infs_found(scaler, None)], [any(every)]
        for each, is_found in zip(noted, every, strict=True):
            each.clear()
            each[device] = torch.tensor(float(is_found), device=device)

    def load(self, checkpoint: Source, *, strict: bool, assign: bool, init: Init | None) -> Any:
        with self._given_values() as (model, homes):
            own = set(filter(self.compiler.is_own, model.state_dict()))
            return load(
                model, checkpoint, homes, strict=strict, assign=assign, init=init, names=own
            )

    def materialize(self, init: Init | None) -> None:
        """Initialise this rank's tensors that are on "meta". All ranks have to call it: the random
        numbers of each module depend on rank 0's default generator and on the module's name, so
        that the values are the same on any number of ranks."""
        drawn = int(torch.randint(2**62, ()))
        seed = self.compiler.agreement.ask("materialize", drawn)[0]
        with self.compiler.agreement.together(), self._given_values() as (model, homes):
            materialize(model, homes, init, seed)

    def close(self) -> None:
        super().close()
        self.compiler.transport.close()
        self.compiler.agreement.close()
        if self.compiler.replicas is not None:
            self.compiler.replicas.close()


def _digest(tensor: Tensor) -> str:
    """A digest of the values of a tensor: of their bits."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()


def _shapes(values: list[Any]) -> str:
    """The shapes and dtypes of the tensors of a call, which have to be the same on all ranks."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
