"""The compiler of one rank: it compiles what all ranks compile, and keeps what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import ops
from fxpipe.compiler.absent import Absent
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.layout import CutAlike, Layout
from fxpipe.compiler.loss import MiniBatch
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks.lowering import Agreed, RankLowering
from fxpipe.compiler.ranks.tensors import owners, parameters_in_parts, tensors_of_module
from fxpipe.compiler.ranks.world import Ranks
from fxpipe.ir._torch import sharded_modules
from fxpipe.ir.graph import attribute, stages_of
from fxpipe.ir.log import warn
from fxpipe.loading.storage import without_values
from fxpipe.meaning.asked import Asked, Meaning
from fxpipe.meaning.batches import Batches, Finding
from fxpipe.meaning.errors import BatchError, BatchWarning
from fxpipe.meaning.left_out import LabelCondition, LabelWatch
from fxpipe.meaning.loss_of_target import FoundLoss
from fxpipe.meaning.weights import dim_of
from fxpipe.planning.search import Choice
from fxpipe.runtime.ranks.agreement import Agreement
from fxpipe.runtime.ranks.replicas import ReplicaGroup
from fxpipe.runtime.ranks.shards import ShardError, Shards
from fxpipe.runtime.ranks.transport import GroupTransport
from fxpipe.runtime.ranks.watch import Watch
from passes import PartitionError
from passes.chain import ToStages


class RankCompiler(Compiler):
    """Compiles a model on every rank, in such a way that all ranks have the same cut and graphs."""

    def __init__(
        self, model: nn.Module, options: Options, ranks: Ranks, layout: Layout | None = None
    ) -> None:
        super().__init__(model, options, layout)
        self.ranks = ranks
        beside = (group for group in (ranks.replicas, ranks.parts) if group is not None)
        known = [ranks.group, *beside]
        self.agreement = Agreement(ranks.members, ranks.names, known, ranks.device, ranks.timeout)
        self.alarm = self.agreement.alarm
        self.absent = Absent(self.agreement, ranks.device)
        self.replicas: ReplicaGroup | None = None
        if ranks.replicas is not None:
            self.replicas = ReplicaGroup(ranks.replicas, ranks.device, ranks.timeout, self.alarm)
        with self.agreement.together():
            _check_parts(model, ranks)
            self.shards = _shards(model, self.replicas)
        names = ranks.names[ranks.this_replica]
        watch = Watch(f"{self.alarm.name}/{ranks.this_replica.start}", ranks.rank, names)
        self.transport = GroupTransport(
            ranks.group, ranks.device, ranks.timeout, names, watch, self.alarm
        )
        self.lowering = RankLowering(
            model, options, self.layout, ranks, self.agreement, self.transport, self.shards
        )
        self.owners: dict[str, list[int]] = {}
        """The ranks that have each tensor of the model which a compiled graph uses, by its name, as
        :func:`owners` gives them."""
        self._was_on_meta = False
        self._spread_names: set[str] = set()

    @property
    def _asked(self) -> Asked:
        return replace(super()._asked, calls_are_trained=False)

    @property
    def _places(self) -> tuple[int, ...]:
        return self.options.placement  # each rank has memory of its own

    def _to_stages(self, *args: Any) -> ToStages:
        context = super()._to_stages(*args)
        assert isinstance(context.partition, CutAlike)
        cut = Agreed(context.partition, self.agreement)
        return replace(context, partition=cut, places=self.options.placement)

    def _decided(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Choice | str:
        """What rank 0 chooses, which it tells the other ranks."""
        own = super()._decided(inputs) if self.agreement.rank == 0 else ""
        found: Choice | str = self.agreement.ask("choice", own)[0]
        return found

    def _may_open_again(self) -> bool:
        return False  # a call may fail ahead of the cut on one rank, and after it on another one

    def _free_memory(self) -> tuple[float | None, ...]:
        """No limits: rank 0, which cuts the model, does not see the devices of other ranks."""
        return (None,) * len(self.options.lanes)

    def _of_lists(self, *args: Any) -> Mode:
        raise BatchError(
            "lists with one element for each row are not cut where each rank is a process: stack "
            "them to one tensor, to be taken apart in the model, or give chunks=1"
        )

    # ------------------------------------------------------------------------ models on "meta"

    def is_on_meta(self) -> bool:
        """Whether the model has been compiled on "meta". It stays so, since a rank gives values to
        the tensors of its own stages only."""
        return self._was_on_meta or super().is_on_meta()

    def is_own(self, name: str) -> bool:
        """Whether this rank has a tensor of the model. Tensors that no stage uses are rank 0's."""
        return self.ranks.rank in self.owners.get(name, [0])

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank has, by their names."""
        every = self.model.named_parameters()
        return {name: parameter for name, parameter in every if self.is_own(name)}

    def lacking(self) -> dict[str, Tensor]:
        unset = super().lacking()
        return {name: unset[name] for name in unset if not self.owners or self.is_own(name)}

    def _have_values(self) -> None:
        """Raise RuntimeError if a constant of this rank's stages has no value. Programs are kept,
        as nothing can be checked with a part of the values."""
        models = {id(tensor) for _, tensor in tensors_of_module(self.model)}
        for mode in self.cache.modes:
            placement = self.options.placement
            for rank, stage in zip(placement, stages_of(mode.stage_graph), strict=True):
                constants = without_values(stage) if rank == self.ranks.rank else {}
                unset = [name for name, t in constants.items() if id(t) not in models]
                if unset:
                    raise RuntimeError(
                        f'{unset[0]} has been computed from a tensor on "meta", so that it has no '
                        "value: build the model on the CPU"
                    )

    def _meaning(self, *args: Any) -> Meaning:
        if self.is_on_meta() and self.options.check is not False:
            said = (
                f'{type(self.model).__name__} is on "meta" and no rank gets all its values, so '
                "that what the pipeline computes cannot be compared with the model: compile the "
                "model, or a smaller one of the same class, in one process, where it is checked, "
                "and give check=False here"
            )
            if self.options.check is True:
                raise BatchError(said)
            warn(said, BatchWarning)
        return super()._meaning(*args)

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mode:
        args, kwargs = self.absent.filled((args, kwargs), self.ranks.this_replica)
        with self._whole():
            return super()._new(args, kwargs)

    def _whole(self) -> AbstractContextManager[None]:
        """A context in which no parameter is in shards, so that the model can be run and traced."""
        return nullcontext() if self.shards is None else self.shards.gathered()

    def _loss_dim(self, mode: Mode, batch: MiniBatch, chunks: int, asked: Asked) -> FoundLoss:
        batch = self.absent.filled_batch(batch, self.ranks.this_replica)
        options = self.options
        if not self.is_on_meta() or chunks == 1:
            with self._whole():
                return super()._loss_dim(mode, batch, chunks, asked)
        is_said = options.loss_weight is not None
        if not is_said and (options.loss_fn is not None or options.out_dims is None):
            raise BatchError(
                f'{type(self.model).__name__} is on "meta", so that its loss cannot be compared '
                'with those of micro-batches: give loss_weight="rows" if the loss is a mean over '
                'the rows, "sum" if it is a sum, or a function that counts what it is a mean of '
                "(see fxpipe.loss_weight)"
            )
        is_own = options.loss_fn is None
        return FoundLoss(0, mode.loss_dim if is_own else dim_of(options.loss_weight))

    def _watch_of_labels(self, conditions: Iterable[LabelCondition]) -> LabelWatch:
        """A watch for those labels that the loss leaves out for sure, as nothing is checked again
        once there are some. Who has given a function that weighs losses need not be told of it."""
        is_given = self.options.loss_weight is not None
        return super()._watch_of_labels(c for c in conditions if c.is_sure and not is_given)

    def _tell_of_labels(self, batches: Batches, check: Callable[[], Finding]) -> None:
        """Warn without a check, for which all ranks would have to meet: some may have no labels."""
        warn(
            "micro-batches have unequal shares of labels that the loss leaves out, for the first "
            "time, and the loss of a step is the mean of theirs over the rows: for the mean over "
            "all labels that count give loss_weight=, a function that counts them "
            "(see fxpipe.loss_weight)",
            BatchWarning,
        )

    def _tell_of_numbers(self, batches: Batches, check: Callable[[], Finding]) -> None:
        """Say nothing: all ranks would have to meet for a check, and may have other numbers."""

    # ------------------------------------------------------------------------------- its own part

    def _compiled(self, *args: Any) -> Mode:
        self._was_on_meta |= self.is_on_meta()
        mode = super()._compiled(*args)
        for name, ranks in owners(self.model, mode.stage_graph, self.options.placement).items():
            known = self.owners.setdefault(name, ranks)
            if known[0] != ranks[0]:
                raise PartitionError(
                    f"{name} is used by rank {ranks[0]} in this call, and by rank {known[0]} in an "
                    "earlier one, which has its value: compile with a partition= that suits both"
                )
            self.owners[name] = list(dict.fromkeys(known + ranks))
        if self.shards is not None:
            brings = mode.stage_graph.graph.find_nodes(op="call_function", target=ops.bring)
            brought = [attribute(mode.stage_graph, str(node.args[0].target)) for node in brings]
            self.shards.assign(stages_of(mode.stage_graph), brought)
        self.homes = {name: home for name, home in self.homes.items() if self.is_own(name)}
        self._spread()
        return mode

    def _spread(self) -> None:
        """Let all replicas begin with the values of the first one, as if the model had been made in
        one process. This is done once for each tensor."""
        if self.replicas is None:
            return
        sharded = set() if self.shards is None else self.shards.ids
        tensors = {
            name: tensor
            for name, tensor in tensors_of_module(self.model)
            if name in self.owners
            and self.is_own(name)
            and not tensor.is_meta
            and id(tensor) not in sharded
        }
        self.replicas.spread(tensors[name] for name in sorted(tensors.keys() - self._spread_names))
        self._spread_names |= tensors.keys()


def _shards(model: nn.Module, replicas: ReplicaGroup | None) -> Shards | None:
    """The parameters of a model that ``fully_shard`` has cut; None if there are none.

    Raises :class:`ShardError` if there are no replicas on which the shards could be.
    """
    if not sharded_modules(model):
        return None
    if replicas is None:
        raise ShardError(
            "the model has been given to fully_shard, and there are no replicas whose shards could "
            'be gathered: compile for a mesh of two dimensions, such as ("dp", "pp"), and shard '
            'along mesh["dp"]'
        )
    return Shards(model, replicas)


def _check_parts(model: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError if parameters are in parts on other ranks than the mesh says."""
    expected = [] if ranks.parts is None else dist.get_process_group_ranks(ranks.parts)
    for name, parameter in parameters_in_parts(model).items():
        found = parameter.device_mesh.mesh.tolist()
        if found != expected:
            raise ValueError(
                f"{name} is in parts on the ranks {found}, as by parallelize_module, and the mesh "
                f"that compile() was given has such parts on the ranks {expected}: give compile() "
                'a mesh of two dimensions, "pp" for the stages and "tp" for the parts, and '
                'parallelize_module() mesh["tp"]'
            )
