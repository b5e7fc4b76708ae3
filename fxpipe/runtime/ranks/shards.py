"""Shards: parameters that ``fully_shard`` has cut, of which each replica keeps one part.

::

    a step     unshard ── forwards and backwards of all micro-batches ── reduce_scatter ── reshard
                  │                                                            │
    replica 0     ├ all parameters of the stage   (its own rows)   gradients ──┼── of its shards
    replica 1     ├ all parameters of the stage   (its own rows)   gradients ──┴── of its shards

By itself, a module that ``fully_shard`` was given gathers its parameters in each forward, which is
once for each micro-batch. A pipeline takes this over, and gathers those of a stage once in a step.
Between steps a rank has its shards only; optimizers and checkpoints have to do with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import (
    is_told_to_reshard,
    reduce_shards,
    shard_policies,
    sharded_modules,
    take_over_shards,
)
from fxpipe.runtime.ranks.replicas import ReplicaGroup
from fxpipe.runtime.ranks.worker import WorkerJob


class ShardError(ValueError):
    """A model is sharded in a way that a pipeline cannot run."""


class ParameterLink(Protocol):
    """Makes another module have the parameter that a module of the model has."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]

    def refresh(self) -> None:
        """Take the parameter that the model has now."""


class ShardedTogether:
    """Parameters that one call of ``fully_shard`` has cut, and that are gathered together.

    Args:
        name: the name of the module that ``fully_shard`` was given.
        module: that module.
        places: the modules that have the parameters, and the parameters' names there.
    """

    def __init__(self, name: str, module: Any, places: list[tuple[nn.Module, str]]) -> None:
        self.name, self._module, self._places = name, module, places
        self.is_brief = is_told_to_reshard(module)
        self.stage: int | None = None
        self.links: dict[tuple[int, str], ParameterLink] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters as the model has them now: whole, if they are gathered, or else shards."""
        found = (module._parameters[name] for module, name in self._places)
        return [parameter for parameter in found if parameter is not None]

    def has(self, link: ParameterLink) -> bool:
        """Whether a link is one from a parameter of this unit."""
        return any(
            link.theirs is module._parameters and link.name == name for module, name in self._places
        )

    def unshard(self) -> None:
        """Gather the parameters. All replicas have to call it."""
        self._module.unshard()

    def reduce(self, replicas: ReplicaGroup) -> None:
        """Add the sums of the gradients over all replicas to the gradients of the shards."""
        replicas.have_gradients([each for each in self.parameters if each.requires_grad])
        reduce_shards(self._module)

    def reshard(self) -> None:
        """Free the gathered parameters, and keep the shards."""
        self._module.reshard()

    def refresh(self) -> None:
        """Let the graphs of the stage have what the model has now."""
        for link in self.links.values():
            link.refresh()


class Shards:
    """All parameters of a model that are in shards.

    Args:
        model: the model. From now on the modules in it that ``fully_shard`` was given do not gather
            their parameters themselves.
        replicas: the ranks that have the same stages as this one.

    Raises :class:`ShardError` for shards on other ranks than these, for shards on "meta", and for
    policies of ``fully_shard`` that a pipeline does not follow.
    """

    def __init__(self, model: nn.Module, replicas: ReplicaGroup) -> None:
        self.replicas = replicas
        self.units: list[ShardedTogether] = []
        self._pending: dict[int, WorkerJob[None]] = {}  # by stage: the last job for it
        names = {module: name for name, module in model.named_modules()}
        modules = sharded_modules(model)
        for module in modules:
            _check(names[module], module, replicas)
        for module in modules:
            take_over_shards(module)
        for module in modules:
            before = _parameters(model)
            with _as_usual():
                module.unshard()
            now = _parameters(model)
            places = [owner for owner, parameter in now.items() if before[owner] is not parameter]
            module.reshard()
            if places:
                self.units.append(ShardedTogether(names[module], module, places))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are whole, for the model to be compiled. All replicas
        have to enter it at the same time."""
        try:
            with _as_usual():
                for unit in self.units:
                    unit.unshard()
            yield
        finally:
            for unit in self.units:
                unit.reshard()
                unit.refresh()

    def assign(self, stages: Iterable[nn.Module], brought: Iterable[Tensor]) -> None:
        """Learn which stage has which parameters, while these are whole.

        Args:
            stages: the stages, in order.
            brought: parameters that are brought to other stages than their own.

        Raises :class:`ShardError` if parameters that are gathered together are in several stages.
        """
        owned = {id(parameter): unit for unit in self.units for parameter in unit.parameters}
        for tensor in brought:
            if id(tensor) in owned:
                raise ShardError(
                    f"{_called(owned[id(tensor)])} has a weight that several stages share: leave "
                    "the modules that share it out of fully_shard, or put them into one stage, "
                    "with partition="
                )
        for index, stage in enumerate(stages):
            for parameter in stage.parameters():
                unit = owned.get(id(parameter))
                if unit is not None and unit.stage not in (None, index):
                    raise ShardError(
                        f"{_called(unit)} is gathered as a whole, and its parameters are in the "
                        f"stages {unit.stage} and {index}: call fully_shard on modules that are "
                        "in one stage each, such as the blocks, and not on the whole model; or "
                        "cut the model elsewhere, with partition="
                    )
                if unit is not None:
                    unit.stage = index

    def watch(self, links: Iterable[ParameterLink]) -> None:
        """Let graphs have the parameters of the model, to which these links lead, gathered or as
        shards, as the model has them."""
        for link in links:
            for unit in self.units:
                if unit.has(link):
                    unit.links[id(link.ours), link.name] = link

    @property
    def stages(self) -> frozenset[int]:
        """The stages that have parameters in shards."""
        return frozenset(unit.stage for unit in self.units if unit.stage is not None)

    @property
    def brief_stages(self) -> frozenset[int]:
        """The stages of which ``fully_shard`` was told to free parameters after each forward."""
        return frozenset(u.stage for u in self.units if u.stage is not None and u.is_brief)

    @property
    def ids(self) -> set[int]:
        """The ids of all these parameters, as the model has them now."""
        return {id(parameter) for unit in self.units for parameter in unit.parameters}

    # -------------------------------------------------------------------------------- in a program

    def unshard(self, stage: int) -> None:
        """Begin to gather the parameters of a stage, and return at once."""
        self._begin(stage, ShardedTogether.unshard)

    def reduce(self, stage: int) -> None:
        """Begin to sum the gradients of a stage's parameters, and return at once."""
        self._begin(stage, lambda unit: unit.reduce(self.replicas))

    def reshard(self, stage: int) -> None:
        """Free the parameters of a stage, after all that has begun for it, and return at once."""
        self._begin(stage, ShardedTogether.reshard)

    def wait(self, stage: int) -> None:
        """Wait until all that has begun for a stage is done."""
        self.replicas.alarm.wait(self._pending.pop(stage))
        for unit in self._of(stage):
            unit.refresh()

    def _begin(self, stage: int, act: Callable[[ShardedTogether], None]) -> None:
        def job() -> None:
            for unit in self._of(stage):
                act(unit)

        self._pending[stage] = self.replicas.do(job)

    def _of(self, stage: int) -> list[ShardedTogether]:
        return [unit for unit in self.units if unit.stage == stage]


@contextmanager
def _as_usual() -> Iterator[None]:
    """A context in which gathered parameters are made, which last until the end."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _parameters(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter | None]:
    """The parameters of all modules, by these modules and the names there."""
    modules = model.modules()
    return {(m, name): each for m in modules for name, each in m._parameters.items()}


def _called(unit: ShardedTogether) -> str:
    return f"{unit.name!r}, which fully_shard was given," if unit.name else "the model"


def _check(name: str, module: nn.Module, replicas: ReplicaGroup) -> None:
    """Raise :class:`ShardError` for a module whose shards a pipeline cannot use."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.tensor import DTensor

    what = f"{repr(name) if name else 'the model'} has been given to fully_shard"
    for mixed, offload in shard_policies(module):
        if mixed != MixedPrecisionPolicy() or type(offload) is not OffloadPolicy:
            raise ShardError(
                f"{what} with the policies {mixed} and {offload}, which a pipeline does not "
                "follow: leave out mp_policy= and offload_policy=; for mixed precision run the "
                "step under torch.autocast, or have the parameters in torch.bfloat16"
            )
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            continue
        if parameter.is_meta:
            raise ShardError(
                f'{what} on "meta", where there is nothing to gather: give the model values first'
            )
        ranks = parameter.device_mesh.mesh.tolist()
        if ranks != replicas.ranks:
            raise ShardError(
                f"{what} on the ranks {ranks}, and the replicas of its stage are on the ranks "
                f'{replicas.ranks}: give fully_shard(mesh=mesh["dp"]) the dimension of the mesh '
                "that is not for stages"
            )
