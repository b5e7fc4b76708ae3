"""The compiler and the runner of a pipeline whose stages are in several processes, its ranks.

::

    every rank    trace ─ ... ─ partition ─ ... ─ step graph ─ project ─ its own program
                                    │                  │                       │
                          rank 0 says where     all compare what       all say that they are
                                                they have made         ready for the same call

Every rank compiles the whole model, and runs its own part of the step graph. The programs of the
ranks fit together only if all ranks have compiled the same, so the ranks compare what they have
compiled before anything is run.
"""

from __future__ import annotations

import hashlib
import platform
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe import ops
from fxpipe.compiler.absent import Absent
from fxpipe.compiler.bindings import bindings, stages_of
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.history import History
from fxpipe.compiler.layout import CutAlike, Layout
from fxpipe.compiler.loss import Target
from fxpipe.compiler.lowering import Lowering
from fxpipe.compiler.options import Options
from fxpipe.compiler.runner import Runner
from fxpipe.ir._torch import timeout_of
from fxpipe.ir.graph import STAGE, WRITTEN, attribute, stage_nodes
from fxpipe.ir.printing import format_graph
from fxpipe.loading.initialise import Init
from fxpipe.loading.load import Source, load, materialize
from fxpipe.loading.storage import tensors_of, without_values
from fxpipe.meaning.asked import Meaning
from fxpipe.meaning.errors import BatchError, BatchWarning
from fxpipe.meaning.weights import dim_of
from fxpipe.runtime.clock import Record
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.microbatch import Dim
from fxpipe.runtime.program import Program, lower
from fxpipe.runtime.ranks.agreement import Agreement, apart
from fxpipe.runtime.ranks.alarm import Alarm
from fxpipe.runtime.ranks.replicas import Gradients, ReplicaGroup
from fxpipe.runtime.ranks.transport import Edge, GroupTransport, RankError, failure
from fxpipe.runtime.ranks.watch import Watch
from passes import PartitionError, Project, Reduce
from passes.chain import Level, ToPipeline, ToStages
from passes.to_rank.project import edge_of, transfers_of


@dataclass(frozen=True)
class Ranks:
    """The processes that a pipeline runs in: the ranks of a process group, each with one device.

    Args:
        group: the ranks that have the stages.
        device: this process's.
        replicas: the group of the ranks that have the same stages in other replicas of the
            pipeline; None if there is one replica.
        members: the ranks of all replicas, replica by replica, by their numbers in the default
            group.
    """

    group: dist.ProcessGroup
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    members: tuple[int, ...] = ()

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for another one: the timeout of the process group."""
        return timeout_of(self.group, self.device)

    @staticmethod
    def of(given: Any) -> Ranks | None:
        """The ranks that are given to :func:`fxpipe.compile` in place of devices; None if devices
        are given.

        Raises ValueError for a mesh whose dimension for stages is not clear, or a group without
        this process.
        """
        if not dist.is_available():
            return None
        replicas, members = None, list[int]()
        if isinstance(given, DeviceMesh):
            stages, others = _dimensions(given)
            group, kind = given.get_group(stages), given.device_type
            if others:
                replicas = given.get_group(others[0])
                members = given.mesh.movedim(stages, -1).flatten().tolist()
        elif isinstance(given, dist.ProcessGroup):
            group, kind = given, _device_type(given)
        else:
            return None
        if dist.get_rank(group) < 0:
            raise ValueError("this process is no rank of the group: only its ranks compile for it")
        device = torch.device(kind)
        if kind != "cpu":
            device = torch.device(kind, torch.accelerator.current_device_index())
        members = members or dist.get_process_group_ranks(group)
        return Ranks(group, device, replicas, tuple(members))

    @property
    def devices(self) -> list[torch.device]:
        """One device for each rank. A rank uses no device but its own, so that its own device
        stands for every rank's."""
        return [self.device] * dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return dist.get_rank(self.group)

    @property
    def names(self) -> list[str]:
        """What messages call the members."""
        size = dist.get_world_size(self.group)
        if self.replicas is None:
            return [f"rank {rank}" for rank in range(size)]
        return [f"rank {i % size} of replica {i // size}" for i in range(len(self.members))]

    @property
    def this_replica(self) -> slice:
        """The ranks of this replica among all members."""
        size = dist.get_world_size(self.group)
        first = self.members.index(dist.get_rank()) // size * size
        return slice(first, first + size)


def _dimensions(mesh: DeviceMesh) -> tuple[int, list[int]]:
    """The dimension of a mesh along which the stages are, and the other one, if there is one.

    Raises ValueError if that is not clear.
    """
    if mesh.ndim == 1:
        return 0, []
    names = list(mesh.mesh_dim_names or ())
    if mesh.ndim == 2 and names.count("pp") == 1:
        stages = names.index("pp")
        return stages, [1 - stages]
    raise ValueError(
        f"the mesh has the dimensions {tuple(names) or mesh.ndim}: give the one along which the "
        'stages are, such as mesh["pp"]; or two, of which one is called "pp", and the other one is '
        "for replicas, which train on other rows"
    )


def _device_type(group: dist.ProcessGroup) -> str:
    """The type of the devices that a group is for: that of the accelerator, unless the group talks
    by gloo."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend(group) == "gloo":
        return "cpu"
    return accelerator.type


@dataclass
class RankProgram:
    """The program of this rank: its graph, and how many transfers each of its edges has."""

    graph_module: fx.GraphModule
    program: Program
    edges: dict[Edge, int]


@dataclass
class RankUnrolled(Unrolled):
    """A graph of all stages, and the programs that this rank runs of it."""

    every_edge: list[Edge] = field(default_factory=list)
    """The edges between all ranks, in the order in which they are connected."""
    digest: str = ""
    """Stands for the graph when ranks compare what they are about to run."""
    needs: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that need the values of each input, by the input's name, in the graph's order."""
    is_reduced: bool = False
    """Whether losses and gradients are summed over replicas."""
    programs: dict[bool, RankProgram] = field(default_factory=dict)
    """``programs[True]`` gives the output to every rank, ``programs[False]`` to the last only."""


@dataclass(frozen=True)
class Agreed:
    """Model graph → the same, cut as rank 0 cuts it.

    Args:
        cut: the pass that rank 0 cuts with.
        agreement: through which rank 0 tells the other ranks.
    """

    name: ClassVar[str] = "partition"
    cut: CutAlike
    agreement: Agreement

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        layout = self.cut.layout
        if layout.labels and layout.known(gm) is None:
            raise PartitionError(
                "this call takes another path through the model than the calls before it, and the "
                "model cannot be cut anew, since its parameters have been given to ranks already: "
                "compile with a partition= that suits all of these calls"
            )
        if self.agreement.rank == 0:
            gm = self.cut(gm)
        ours = {node.name: node.meta.get(STAGE) for node in stage_nodes(gm.graph)}
        labels: dict[str, int] = self.agreement.ask("cut", ours)[0]
        if labels.keys() != ours.keys():
            name = min(labels.keys() ^ ours.keys())
            both = self.agreement.names[0], self.agreement.names[self.agreement.rank]
            here, there = both[:: 1 if name in labels else -1]
            raise RankError(
                f"the model is not the same on all ranks: {here} has a node {name!r} in its graph, "
                f"and {there} has not"
            )
        if self.agreement.rank:
            for node in stage_nodes(gm.graph):
                node.meta[STAGE] = labels[node.name]
            layout.learn(gm)
        return gm


class RankLowering(Lowering):
    """Lowers a graph of all stages to the programs of one rank, once all ranks have the same one.

    Args:
        ranks, agreement, transport: those of the compiler.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        ranks: Ranks,
        agreement: Agreement,
        transport: GroupTransport,
    ) -> None:
        super().__init__(model, options)
        self.ranks, self.agreement, self.transport = ranks, agreement, transport

    def pipeline(self, mode: Mode, chunks: int) -> Unrolled:
        """The graph that a call without gradients runs: micro-batches and their stages only. It
        needs no copies or portals, as tensors are transmitted from rank to rank."""
        options = self.options
        context = ToPipeline(
            options.names, chunks, tuple(mode.in_dims), tuple(mode.out_dims), "never", 1
        )
        gm, title = mode.stage_graph, f"ranks of {chunks}"
        history = History.observed(self.model, title, gm, options.observer)
        for entry in options.passes.entries:
            if entry.leads_to == Level.PIPELINE and entry.source == Level.STAGE:
                gm = history(entry.make(context), gm)
        return self.programs(mode, gm, chunks, history)

    def programs(self, mode: Mode, gm: fx.GraphModule, chunks: int, history: History) -> Unrolled:
        for node in gm.graph.find_nodes(op="placeholder"):
            if WRITTEN in node.meta:
                raise ValueError(
                    f"the model writes to its input {node.name}, of which every rank has its own "
                    "tensor, so that the ranks would differ: let it write to a copy"
                )
        count = len(gm.graph.find_nodes(op="placeholder"))
        if self.ranks.replicas is not None:
            gm = history(Reduce(), gm)
        is_reduced = len(gm.graph.find_nodes(op="placeholder")) > count
        whole = super().programs(mode, gm, chunks, history)
        self._compare(mode, gm)
        unrolled = RankUnrolled(
            whole.graph_module, whole.inline, None, history, is_reduced=is_reduced
        )
        unrolled.digest = _digest(format_graph(gm))
        for everywhere in (True, False):
            parts = [
                Project(self.options.placement, rank, everywhere)(gm)
                for rank in range(len(self.options.lanes))
            ]
            own = parts[self.ranks.rank]
            mode.bindings += bindings(own, self.model)
            transfers = [edge_of(node)[0] for node in transfers_of(own)]
            edges = {edge: transfers.count(edge) for edge in sorted(set(transfers))}
            unrolled.programs[everywhere] = RankProgram(own, lower(own), edges)
            if everywhere:  # the edges of the other program are among these
                every = {edge_of(node)[0] for part in parts for node in transfers_of(part)}
                unrolled.every_edge = sorted(every)
                unrolled.needs = _needs(gm, parts)
        self.transport.connect(unrolled.every_edge)
        return unrolled

    def _compare(self, mode: Mode, gm: fx.GraphModule) -> None:
        """Compare what this rank has compiled with what every other rank has.

        Raises :class:`RankError`, which says what differs.
        """
        own = self._fingerprint(mode, gm)
        names = self.agreement.names
        for name, other in zip(names, self.agreement.ask("plan", own), strict=True):
            differing = [what for what in own if own[what] != other[what]]
            if differing:
                what = differing[0]
                raise RankError(
                    f"{names[self.agreement.rank]} and {name} have not compiled the same: they "
                    f"differ in their {what} ({own[what]} and {other[what]})"
                )

    def _fingerprint(self, mode: Mode, gm: fx.GraphModule) -> dict[str, str]:
        options, device = self.options, self.ranks.device
        tensors = [
            f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        ]
        stages = "".join(map(format_graph, stages_of(mode.stage_graph)))
        return {
            "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
            "schedules": str(options.schedule),
            "options": f"{options.placement}, {options.checkpoint}, {options.checkpoint_segments}",
            "parameters and buffers": _digest("\n".join(tensors)),
            "stages": _digest(stages.replace(str(device), device.type)),
            "graphs": _digest(format_graph(gm).replace(str(device), device.type)),
        }


class RankCompiler(Compiler):
    """Compiles a model on every rank, in such a way that all ranks have the same cut and graphs."""

    def __init__(
        self, model: nn.Module, options: Options, ranks: Ranks, layout: Layout | None = None
    ) -> None:
        super().__init__(model, options, layout)
        self.ranks = ranks
        whole = ranks.group if ranks.replicas is None else None
        self.agreement = Agreement(ranks.members, ranks.names, whole, ranks.timeout)
        name = self.agreement.ask("name", uuid.uuid4().hex)[0]
        self.absent = Absent(self.agreement, ranks.device)
        self.replicas: ReplicaGroup | None = None
        if ranks.replicas is not None:
            alarm = Alarm(name)
            self.replicas = ReplicaGroup(ranks.replicas, ranks.device, ranks.timeout, alarm)
        replica = ranks.this_replica.start
        self.transport = GroupTransport(
            ranks.group, ranks.device, ranks.timeout, Watch(f"{name}/{replica}", ranks.rank)
        )
        self.lowering = RankLowering(model, options, ranks, self.agreement, self.transport)
        self.owners: dict[str, list[int]] = {}
        """The ranks that have each tensor of the model which a compiled graph uses, by its name, as
        :func:`owners` gives them."""
        self._was_on_meta = False
        self._spread_names: set[str] = set()

    def _to_stages(self, *args: Any) -> ToStages:
        context = super()._to_stages(*args)
        assert isinstance(context.partition, CutAlike)
        cut = Agreed(context.partition, self.agreement)
        return replace(context, partition=cut, places=self.options.placement)

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
            warnings.warn(said, BatchWarning, stacklevel=2)
        return super()._meaning(*args)

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mode:
        args, kwargs = self.absent.filled((args, kwargs), self.ranks.this_replica)
        return super()._new(args, kwargs)

    def _loss_dim(self, mode: Mode, readings: Sequence[Target], chunks: int) -> tuple[int, Dim]:
        readings = self.absent.filled_targets(readings, self.ranks.this_replica)
        options = self.options
        if not self.is_on_meta() or chunks == 1:
            return super()._loss_dim(mode, readings, chunks)
        is_said = options.loss_weight is not None
        if not is_said and (options.loss_fn is not None or options.out_dims is None):
            raise BatchError(
                f'{type(self.model).__name__} is on "meta", so that its loss cannot be compared '
                'with those of micro-batches: give loss_weight="rows" if the loss is a mean over '
                'the rows, "sum" if it is a sum, or a function that counts what it is a mean of '
                "(see fxpipe.loss_weight)"
            )
        return 0, mode.loss_dim if options.loss_fn is None else dim_of(options.loss_weight)

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
        self.homes = {name: home for name, home in self.homes.items() if self.is_own(name)}
        self._spread()
        return mode

    def _spread(self) -> None:
        """Let all replicas begin with the values of the first one, as if the model had been made in
        one process. This is done once for each tensor."""
        if self.replicas is None:
            return
        tensors = {
            name: tensor
            for name, tensor in tensors_of_module(self.model)
            if name in self.owners and self.is_own(name) and not tensor.is_meta
        }
        self.replicas.spread(tensors[name] for name in sorted(tensors.keys() - self._spread_names))
        self._spread_names |= tensors.keys()


class RankRunner(Runner):
    """Runs the programs of this rank, at the same time as the other ranks run theirs."""

    compiler: RankCompiler

    def __init__(self, compiler: RankCompiler) -> None:
        super().__init__(compiler)
        self.program: RankProgram | None = None  # the program that has run last
        self._failed = ""  # how a step of replicas has failed

    def _check_open(self) -> None:
        super()._check_open()
        if self._failed:
            raise RankError(
                f"a step of replicas has failed ({self._failed}), after which their sums are out "
                "of step: start the processes again"
            )

    def ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any], Unrolled]:
        with self.compiler.agreement.together():
            args, kwargs, _ = self._completed(args, kwargs, None)
            return super().ready(args, kwargs)

    def ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
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
        """Run this rank's program, in which every rank gets the output."""
        return self.run_for(unrolled, values, everywhere=True)

    def run_for(self, unrolled: Unrolled, values: list[Any], everywhere: bool) -> Any:
        """Run this rank's program. Unless the output is for all ranks, it is None on all but the
        last."""
        assert isinstance(unrolled, RankUnrolled)
        compiler = self.compiler
        if compiler.homes:
            return super().run(unrolled, values)  # raises, as the model has no values yet
        mine = unrolled.programs[everywhere]
        self._agree(unrolled, values, everywhere)
        self.program = mine
        absent = compiler.absent
        values = [value.to("meta") if absent.is_ghost(value) else value for value in values]
        run = partial(run_inline, mine.program, [compiler.transport, *values])
        if unrolled.is_reduced and compiler.replicas is not None:
            gradients = Gradients(compiler.replicas, compiler.own_parameters().values())
            given = [compiler.transport, *values, gradients]
            run = partial(self._run_replicated, partial(run_inline, mine.program, given))
        return compiler.transport.run(run, mine.edges, key=0)

    def _run_replicated(self, run: Callable[[], Any]) -> Any:
        """Run a program that sums over replicas. If it fails, the alarm is rung, and the pipeline
        cannot be used again: other replicas may have begun sums that this one has not."""
        compiler = self.compiler
        assert compiler.replicas is not None
        compiler.replicas.alarm.begin()
        try:
            return run()
        except BaseException as error:
            name = compiler.agreement.names[compiler.agreement.rank]
            text = str(error) if isinstance(error, RankError) else failure(name, error)
            compiler.replicas.alarm.ring(text)
            self._failed = text
            raise

    def _agree(self, unrolled: RankUnrolled, values: list[Any], everywhere: bool) -> None:
        """Raise :class:`RankError` unless all ranks are about to run the same graph, and those of
        this replica with values of the same shapes."""
        agreement, members = self.compiler.agreement, self.compiler.ranks.this_replica
        run = f"run of {unrolled.digest}, {everywhere}"
        with agreement.together():
            self._refuse_absent(unrolled, values)
            answers = agreement.ask(run, f"{run}, with {_shapes(values)}")[members]
        if len(set(answers)) > 1:
            raise RankError(apart(dict(zip(agreement.names[members], answers, strict=True))))

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

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of this rank's parameters by the norm of those of all ranks; see
        :meth:`fxpipe.ranks.RankPipeline.clip_grad_norm_`."""
        compiler, ranks = self.compiler, self.compiler.ranks
        own = compiler.own_parameters()
        norms = {
            name: torch.linalg.vector_norm(parameter.grad, norm_type).cpu()
            for name, parameter in own.items()
            if parameter.grad is not None
        }
        answers = compiler.agreement.ask("clip_grad_norm_", norms)[ranks.this_replica]
        every = {name: norm for answer in answers for name, norm in answer.items()}
        names = [name for name, _ in compiler.model.named_parameters() if name in every]
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
        nn.utils.clip_grads_with_norm_(own.values(), max_norm, total.to(ranks.device))
        return total.to(ranks.device)

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
        if self.compiler.replicas is not None:
            self.compiler.replicas.close()


def owners(
    model: nn.Module, stage_graph: fx.GraphModule, ranks: tuple[int, ...]
) -> dict[str, list[int]]:
    """The ranks that have each tensor of a model that a stage graph uses, by all its names.

    The first rank is the one that keeps the tensor up to date. A parameter has only this one, which
    is the one that sends its value to the others if several stages share it. Any other tensor is
    had by each rank that reads it, and the first of them is the first in the list: tensors that are
    written to are used in one stage only (pass "alias").
    """
    homes: dict[int, list[int]] = {}
    stages = stages_of(stage_graph)
    for rank, stage in zip(ranks, stages, strict=True):
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            if share.args[0].op == "get_attr":
                homes.setdefault(id(attribute(stage, str(share.args[0].target))), [rank])

    def used(tensor: Any, rank: int) -> None:
        known = homes.setdefault(id(tensor), [rank])
        if rank not in known and not isinstance(tensor, nn.Parameter):
            known.append(rank)

    for rank, stage in zip(ranks, stages, strict=True):
        for _, tensor in tensors_of_module(stage):
            used(tensor, rank)
    for node in stage_graph.graph.find_nodes(op="get_attr"):
        for user in node.users:
            if STAGE in user.meta:
                used(attribute(stage_graph, str(node.target)), ranks[user.meta[STAGE]])
    return {
        name: homes[id(tensor)] for name, tensor in tensors_of_module(model) if id(tensor) in homes
    }


def _needs(gm: fx.GraphModule, parts: Sequence[fx.GraphModule]) -> dict[str, list[int]]:
    """The ranks that need the values of each input of a graph of all stages, by the input's name.
    A rank that weighs losses by numbers of rows needs an input's shape only."""
    by_shape = ops.weights, ops.gather

    def has_values(part: fx.GraphModule, name: str) -> bool:
        inputs = part.graph.find_nodes(op="placeholder")
        users = next(list(node.users) for node in inputs if node.name == name)
        scattered = [each for user in users for each in user.users if user.target is ops.scatter]
        direct = any(user.target is not ops.scatter for user in users)
        return direct or any(user.target not in by_shape for user in scattered)

    return {
        node.name: [rank for rank, part in enumerate(parts) if has_values(part, node.name)]
        for node in gm.graph.find_nodes(op="placeholder")
    }


def tensors_of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, buffers, and tensors that are plain attributes, of a module and the modules
    in it, under all their names."""
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in tensors_of(each):
            yield f"{path}.{name}".removeprefix("."), tensor


def _shapes(values: list[Any]) -> str:
    """The shapes and dtypes of the tensors of a call, which have to be the same on all ranks."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
