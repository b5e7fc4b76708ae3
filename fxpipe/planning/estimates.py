"""The costs of a training step: estimated, for plans and pipelines alike, or measured on the lanes.

The simulator turns estimated costs into a predicted timeline. A run of the step graph that notes
when each node begins and ends gives a measured timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from torch import fx

from fxpipe import ops
from fxpipe.ir.cost import (
    Cost,
    batch_bytes,
    memories_of,
    saved_sizes,
    state_of,
)
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import (
    ACTION,
    MICROBATCH,
    ORIGIN,
    SAVED,
    SHARED,
    STAGE,
    nodes_of_stages,
    stages_of,
)
from fxpipe.ir.workspace import (
    StageWorkspace,
    sent_gradients,
    stage_workspaces,
)
from fxpipe.runtime.checkpointing.offload import that_move
from fxpipe.runtime.clock import Mark
from fxpipe.schedule import (
    Action,
    Edge,
    Kind,
    Link,
    Links,
    Memory,
    Schedule,
    Span,
    StageCost,
    Timeline,
    WhileRunning,
    Workspace,
    joined,
    simulate,
    simulate_forwards,
)
from fxpipe.schedule.simulator import LOSS, LOSS_BACKWARD
from passes.common.modes import (
    SELECTIVE,
    Modes,
    away,
    checkpointed,
    moved,
    of_stages,
    offloaded,
    run_again,
)
from passes.common.segments import Segments, counts
from passes.common.skips import Hop, SkipLayout
from passes.cost.update import Update

Ends = tuple[int, int]  # the numbers of two stages, one of which sends to the other


def estimated_costs(
    costs: Sequence[Cost],
    chunks: int,
    checkpoint: Modes = "never",
    segments: Sequence[Sequence[float]] | None = None,
) -> list[StageCost]:
    """The seconds that one micro-batch takes at each stage, from the costs of a mini-batch.

    A backward is split in two equal halves, for the gradients of the inputs and of the parameters,
    as for a matrix product. A checkpointed micro-batch runs its forward again. Of a stage that does
    so in several ``segments``, all but the last segment wait until the backward has come to them,
    so that these count as part of the backward, as the average over the micro-batches. Where the
    results of products are kept, the forward that is run again is one without them.

    ``segments``: the part of each stage's forward that each segment takes, as [0.5, 0.5]; None:
    each stage has one segment.
    """
    found, modes = [], of_stages(checkpoint, len(costs))
    shares = segments or [[1.0]] * len(costs)
    for cost, mode, parts in zip(costs, modes, shares, strict=True):
        number = run_again(mode, len(parts))
        again = checkpointed(mode, chunks) / chunks * sum(parts[:number])
        forward, half = cost.forward_s / chunks, cost.backward_s / 2 / chunks
        second = cost.selective_s / chunks if mode == SELECTIVE else forward
        # The segment that is recomputed ahead of the whole backward, unless the last one is kept.
        last = second * parts[-1] if number == len(parts) else 0.0
        found.append(
            StageCost(
                forward,
                half + again * second - checkpointed(mode, chunks) / chunks * last,
                half,
                recompute=0.0 if moved(mode) else last,
                checkpointed=checkpointed(mode, chunks),
            )
        )
    return found


def equal_parts(segments: Segments, checkpoint: Modes, stages: int) -> list[list[float]]:
    """The parts of each stage's forward that its segments take, if these take equally long."""
    return [[1 / number] * number for number in counts(segments, checkpoint, stages)]


def with_moves(
    costs: Sequence[StageCost], stages: Sequence[StageMemory], chunks: int, checkpoint: Modes
) -> list[StageCost]:
    """The same costs, with the bytes that each micro-batch moves to the host's memory, and how many
    tensors have them. Nothing is run again there: where costs have been measured, the time that is
    taken for that is one of waiting for the host."""
    modes = of_stages(checkpoint, len(stages))
    return [
        replace(
            cost,
            recompute=0.0,
            checkpointed=0,
            offloaded=stage.moves(mode, chunks) / chunks,
            offloaded_tensors=stage.moving(mode, chunks),
        )
        if moved(mode)
        else cost
        for cost, stage, mode in zip(costs, stages, modes, strict=True)
    ]


def with_updates(
    costs: Sequence[StageCost],
    stages: Sequence[StageMemory],
    devices: Sequence[DeviceSpec],
    update: Update,
) -> list[StageCost]:
    """The same costs, with the time of the optimizer's step. ``devices`` has the device of each
    stage."""
    return [
        replace(cost, update=update.seconds(stage.gradients, stage.trained, device))
        for cost, stage, device in zip(costs, stages, devices, strict=True)
    ]


def measured_costs(
    timeline: Timeline, stages: int, average: Callable[[list[float]], float] = median
) -> list[StageCost]:
    """The seconds that one micro-batch takes at each stage, as averages over a measured timeline.

    Args:
        average: the median, by which single micro-batches that the machine has disturbed do not
            count, or the mean, where nothing disturbs them.
    """
    taken: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    loss: defaultdict[str, list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.action is not None:
            taken[span.action.stage, span.action.kind].append(span.seconds)
        else:
            loss[span.name].append(span.seconds)

    def seconds(stage: int, kind: Kind) -> float:
        return average(taken[stage, kind] or [0.0])

    found = [
        StageCost(
            seconds(i, Kind.FORWARD),
            seconds(i, Kind.BACKWARD_INPUT),
            seconds(i, Kind.WEIGHT_GRAD),
            seconds(i, Kind.BACKWARD) or None,
            seconds(i, Kind.RECOMPUTE),
            len(taken[i, Kind.RECOMPUTE]),
        )
        for i in range(stages)
    ]
    return with_loss(found, *(average(loss[name] or [0.0]) for name in (LOSS, LOSS_BACKWARD)))


def with_loss(
    costs: Sequence[StageCost], seconds: float, backward_seconds: float
) -> list[StageCost]:
    """The same costs, with the time that the loss of a micro-batch takes, and its backward: the
    last stage computes them."""
    last = replace(costs[-1], loss=seconds, loss_backward=backward_seconds)
    return [*costs[:-1], last]


def traffic(
    layout: SkipLayout, chunks: int, graph: fx.Graph | None = None
) -> tuple[list[Edge], list[Edge]]:
    """The bytes that stages send to each other, as two lists of edges.

    The edges of the first list are used once for each of ``chunks`` micro-batches: one edge stands
    for all values that one stage sends to another, with their bytes for a micro-batch. The edges of
    the second list, one for each shared parameter, are used once a step. Between stages of one
    device a shared parameter need not be sent. But each micro-batch has a gradient of it, as large
    as the parameter however few rows there are, which goes back.

    Args:
        layout: the values that stages send, with their bytes for a mini-batch.
        graph: the model graph, which says what values get a gradient. None: a gradient has as many
            bytes as its value, and so has that of a value which is no node of the graph.
    """
    nodes = {} if graph is None else {_name_of(node): node for node in graph.nodes}
    there, back = defaultdict[Ends, list[int]](list), defaultdict[Ends, list[int]](list)
    once = []
    for hop in layout.hops:
        if hop.source is None:  # inputs of the model are on their stage when the step begins
            continue
        node = nodes.get(hop.value)
        sent, returned = hop.bytes, hop.bytes if node is None else batch_bytes(node, trained=True)
        if hop.once:
            once.append(Edge(hop.source, hop.target, sent, returned))
            continue
        if node is not None and SHARED in node.meta:
            sent, returned = 0, returned * chunks
        there[hop.source, hop.target].append(sent)
        back[hop.source, hop.target].append(returned)
    edges = [
        Edge(
            *ends,
            sum(sizes) / chunks,
            sum(back[ends]) / chunks,
            tensors=len(sizes),
            gradient_tensors=sum(map(bool, back[ends])),
        )
        for ends, sizes in there.items()
    ]
    return edges, once


def _name_of(node: fx.Node) -> str:
    """The name by which a layout knows the value of a node of a model graph."""
    return str(node.target) if node.op == "get_attr" else node.name


def step_links(
    layout: SkipLayout,
    chunks: int,
    specs: Sequence[DeviceSpec],
    names: Sequence[str],
    graph: fx.Graph | None = None,
) -> Links:
    """How data travels in a step: between two lanes over a link that is as slow as the slower of
    their devices' links, and from a lane to the host's memory over that of its device.

    Args:
        layout, chunks, graph: as for :func:`traffic`.
        specs: the description of each lane's device.
        names: the name of each lane's device. Between lanes of one name nothing has to travel.
    """
    edges, once = traffic(layout, chunks, graph)
    between = {
        (a, b): Link(
            max(one.link_latency_s, other.link_latency_s),
            min(one.link_bytes_per_s, other.link_bytes_per_s),
        )
        for a, one in enumerate(specs)
        for b, other in enumerate(specs)
        if names[a] != names[b]
    }
    host = {
        lane: Link(spec.link_latency_s, spec.host_bytes_per_s)
        for lane, spec in enumerate(specs)
        if spec.host_bytes_per_s
    }
    return Links(edges, between=between, once=once, host=host)


def predicted(
    schedule: Schedule,
    costs: Sequence[StageCost],
    links: Links,
    memory: Memory | None = None,
    *,
    training: bool = True,
) -> Timeline:
    """Simulate a training step of a pipeline, or a call of it if ``training`` is False."""
    if not training:
        return simulate_forwards(schedule, costs, links, memory)
    order = joined(schedule, [(edge.source, edge.target) for edge in links.edges or ()])
    away = [stage for stage, cost in enumerate(costs) if cost.offloaded]
    return simulate(order.reloading(away), costs, links, memory)


@dataclass(frozen=True)
class StageMemory:
    """The bytes that one stage keeps.

    Attributes:
        fixed: what the stage keeps all the time: parameters, gradients, optimizer states, buffers,
            and its copies of parameters that it shares with other stages.
        activations: the saved tensors of a whole mini-batch.
        gradients: the bytes of the gradients of parameters.
        trained: the number of these gradients.
        saved: the bytes of each of the activations, in the order in which the forward saves them;
            none if that is not known.
        recomputed: how many of them are there at one time if the whole mini-batch is recomputed;
            None: all of them, as the stage has one segment.
        inputs: the inputs of the stage for a whole mini-batch, which checkpointed micro-batches
            keep in place of the saved tensors.
        kept: the activations of those segments that are never run again, for a whole mini-batch.
        products: the results of products for a whole mini-batch, which they keep as well if they
            are recomputed with these.
        workspace: what the stage needs only while it runs; None if that is not known.
        kept_results: by later stages, how many bytes of what this stage sends to each of them are
            among its own activations, for a whole mini-batch.
        views: by earlier stages, how many bytes more than the gradients that this stage sends back
            to each of them the memories have of which these are views, for a whole mini-batch.
        joined: the bytes of the largest output that the stage puts together, at the end of a call
            without a backward, from those of the micro-batches, which are there until it is done.
    """

    fixed: float
    activations: float
    inputs: float
    workspace: StageWorkspace | None = None
    kept_results: Mapping[int, float] = field(default_factory=dict)
    views: Mapping[int, float] = field(default_factory=dict)
    joined: float = 0.0
    recomputed: float | None = None
    products: float = 0.0
    kept: float = 0.0
    saved: tuple[int, ...] = ()
    gradients: float = 0.0
    trained: int = 0

    @property
    def activations_at_once(self) -> float:
        """How many bytes of the activations are there at one time if they are recomputed."""
        return self.activations if self.recomputed is None else self.recomputed

    def moves(self, mode: str, chunks: int) -> float:
        """How many bytes of the activations wait in the host's memory, for a whole mini-batch. As
        whole tensors move, these are not quite the part that the mode says."""
        if not self.saved:
            return self.activations * moved(mode)
        return sum(self.saved[i] for i in self._that_move(mode, chunks))

    def moving(self, mode: str, chunks: int) -> int:
        """How many tensors of a micro-batch wait in the host's memory; 1 if that is not known."""
        return len(self._that_move(mode, chunks)) if self.saved else 1

    def _that_move(self, mode: str, chunks: int) -> list[int]:
        share = moved(mode)
        return that_move([n / chunks for n in self.saved], share) if share else []

    def waits(self, mode: str, chunks: int) -> float:
        """How many bytes of the activations are there from the forward to the backward, for a
        whole mini-batch, where the others are recomputed or come back."""
        if mode == SELECTIVE:
            return self.products
        return self.activations - self.moves(mode, chunks) if moved(mode) else self.kept

    @property
    def released_by_half(self) -> float:
        """The part of the activations that the first half of a backward frees, less the gradients
        that it leaves for the second half; 0 if that is not known."""
        if self.workspace is None or not self.activations:
            return 0.0
        return 1 - self.workspace.between / self.activations

    @property
    def kept_inputs(self) -> float:
        """How many bytes of the inputs are among the activations, as far as that is known."""
        return 0.0 if self.workspace is None else self.workspace.kept_inputs


@dataclass(frozen=True)
class LossMemory:
    """The bytes that the loss saves for its backward.

    Attributes:
        saved: all of them, for a whole mini-batch.
        shared: how many of these the last stage has saved as well.
        products: how many of these are results of products in the last stage, such as the logits of
            a linear layer: with "selective" the stage keeps them.
        workspace: the most bytes, beyond those, that the loss and its backward need at any time.
    """

    saved: float = 0.0
    shared: float = 0.0
    products: float = 0.0
    workspace: float = 0.0


def stage_memory(
    costs: Sequence[Cost],
    layout: SkipLayout,
    stage_graph: fx.GraphModule | None = None,
    *,
    training: bool = True,
) -> list[StageMemory]:
    """The memory of each stage, from its cost for a mini-batch and the values that it receives.

    A shared parameter that a stage receives does not count as one of its inputs: its device keeps
    it once for all micro-batches, and its bytes are in the cost of a stage.

    ``stage_graph``: the stages, whose nodes have costs, from which follows what stages need while
    they run, and which of their results they keep anyway. None: nothing of this is known.
    ``training``: whether the stages have backwards.
    """
    values = [] if stage_graph is None else list(map(_values, stages_of(stage_graph)))
    inputs = [0] * len(costs)
    for hop in layout.hops:
        inputs[hop.target] += 0 if _is_shared(hop, values) else hop.bytes
    found = [
        StageMemory(
            cost.fixed_bytes,
            cost.activation_bytes,
            received,
            products=cost.product_bytes,
            gradients=cost.gradient_bytes,
            trained=cost.trained,
        )
        for cost, received in zip(costs, inputs, strict=True)
    ]
    if stage_graph is None:
        return found
    workspaces, stages = stage_workspaces(stage_graph), nodes_of_stages(stage_graph)
    joined = [0.0] * len(costs) if training else _joined_outputs(stage_graph.graph, len(costs))
    results = _kept_results(stages, values, layout)
    views = _views(stages, values, layout) if training else [{}] * len(costs)
    return [
        replace(
            stage,
            workspace=workspace,
            kept_results=kept,
            views=larger,
            joined=most,
            saved=tuple(saved_sizes(nodes)),
        )
        for stage, workspace, kept, larger, most, nodes in zip(
            found, workspaces, results, views, joined, stages, strict=True
        )
    ]


def _joined_outputs(graph: fx.Graph, stages: int) -> list[float]:
    """For each stage, the bytes of the largest output of the model that it computes."""
    found = [0.0] * stages
    for node in graph.output_node().all_input_nodes:
        if (stage := node.meta.get(STAGE)) is not None:
            found[stage] = max(found[stage], batch_bytes(node))
    return found


def _values(stage: fx.GraphModule) -> dict[str, fx.Node]:
    """The nodes of a stage, inputs among them, by their names in the model graph."""
    return {node.meta.get(ORIGIN, node.name): node for node in reversed(stage.graph.nodes)}


def _is_shared(hop: Hop, values: Sequence[Mapping[str, fx.Node]]) -> bool:
    """Whether a value that stages send is a parameter. ``values``: those of each stage by their
    names; none if they are not known."""
    node = values[hop.target].get(hop.value) if values else None
    return hop.once or (node is not None and SHARED in node.meta)


def _kept_results(
    stages: Sequence[Sequence[fx.Node]], values: Sequence[Mapping[str, fx.Node]], layout: SkipLayout
) -> list[dict[int, float]]:
    """For each stage, how many bytes of what it sends to others are among its activations, or are
    parameters of its own."""
    saved = [
        {memory for node in own for memory, _ in node.meta.get(SAVED, ())} | state_of(own)
        for own in stages
    ]
    found: list[dict[int, float]] = [{} for _ in stages]
    for hop in layout.hops:
        if _is_shared(hop, values):
            continue
        if hop.source is not None and hop.value in values[hop.source]:
            memories = {memory for memory, _ in memories_of(values[hop.source][hop.value])}
            if memories <= saved[hop.source]:
                known = found[hop.source]
                known[hop.target] = known.get(hop.target, 0.0) + hop.bytes
    return found


def _views(
    stages: Sequence[Sequence[fx.Node]], values: Sequence[Mapping[str, fx.Node]], layout: SkipLayout
) -> list[dict[int, float]]:
    """For each stage, how many bytes more than the gradients that it sends back the memories have
    of which these gradients are views."""
    sent = list(map(sent_gradients, stages))
    memories: list[dict[int, dict[int, int]]] = [{} for _ in stages]
    own: list[dict[int, float]] = [{} for _ in stages]
    for hop in layout.hops:
        if hop.source is None or hop.once or hop.value not in values[hop.target]:
            continue
        if found := sent[hop.target].get(hop.value):
            value = values[hop.target][hop.value]
            known, size = own[hop.target], batch_bytes(value, trained=True)
            known[hop.source] = known.get(hop.source, 0.0) + size
            memories[hop.target].setdefault(hop.source, {}).update(found)
    return [
        {source: max(0.0, sum(all_of[source].values()) - size) for source, size in known.items()}
        for known, all_of in zip(own, memories, strict=True)
    ]


def step_memory(
    stages: Sequence[StageMemory],
    placement: Sequence[int],
    chunks: int,
    checkpoint: Modes,
    loss: LossMemory = LossMemory(),
    updates: Sequence[float] = (),
) -> Memory:
    """The memory of a training step, in the form that the simulator and the search for a schedule
    take. ``placement`` has the lane of each stage, and ``updates`` are those of :func:`updates_on`
    the lanes."""
    fixed, updating = [0.0] * (1 + max(placement)), []
    for lane, stage in zip(placement, stages, strict=True):
        fixed[lane] += stage.fixed
        updating.append(stage.gradients * updates[lane] if updates else 0.0)
    hosts, modes = offloaded(checkpoint, len(stages)), of_stages(checkpoint, len(stages))
    if modes[-1] == SELECTIVE:  # of which every micro-batch is run again
        loss = replace(loss, saved=loss.saved - loss.products, shared=0.0)
    stages = [
        _with_a_host(stage, stage.waits(mode, chunks)) if moved(mode) else stage
        for stage, mode in zip(stages, modes, strict=True)
    ]
    stages = [
        _with_products(stage) if mode == SELECTIVE else stage
        for stage, mode in zip(stages, modes, strict=True)
    ]
    # Results of products wait as inputs do, and so do activations that stay where others move. The
    # second run uses them in place of its own, so that it adds so much less.
    waiting = [stage.waits(mode, chunks) for stage, mode in zip(stages, modes, strict=True)]
    return Memory(
        [stage.activations / chunks for stage in stages],
        fixed,
        released_by_input=[stage.released_by_half for stage in stages],
        checkpointed=[away(mode, chunks) for mode in modes],
        inputs=[(stage.inputs + own) / chunks for stage, own in zip(stages, waiting, strict=True)],
        recomputed=[stage.activations_at_once / chunks for stage in stages],
        loss=loss.saved / chunks,
        shared_with_loss=loss.shared / chunks,
        kept_inputs=[
            (stage.kept_inputs * (i not in hosts) + own) / chunks
            for i, (stage, own) in enumerate(zip(stages, waiting, strict=True))
        ],
        offloaded=hosts,
        running=_running(stages, chunks, loss, updating),
    )


def updates_on(specs: Sequence[DeviceSpec], update: Update) -> list[float]:
    """How many bytes the step of an optimizer needs on each lane while it runs, for each byte of
    the parameters. On accelerators, which have a host, it steps all parameters at once; on a CPU
    one after the other."""
    return [update.memory if spec.host_bytes_per_s else 0.0 for spec in specs]


def _with_products(stage: StageMemory) -> StageMemory:
    """The memory of a stage that keeps the results of products: its first forward has them, and not
    twice those that it saves as well."""
    if stage.workspace is None:
        return stage
    return replace(stage, workspace=replace(stage.workspace, again=stage.workspace.selective))


def _with_a_host(stage: StageMemory, stays: float) -> StageMemory:
    """The memory of a stage that moves its activations to the host, all but ``stays`` bytes. It
    keeps no inputs. While its forward runs all of them are there, of which those that stay count
    as kept."""
    workspace = stage.workspace
    if workspace is not None:
        workspace = replace(workspace, again=max(0, workspace.again - round(stays)))
    return replace(stage, inputs=0.0, recomputed=None, workspace=workspace)


def _running(
    stages: Sequence[StageMemory], chunks: int, loss: LossMemory, updating: Sequence[float]
) -> WhileRunning | None:
    """What lanes hold while a step runs; None if that is not known of all stages."""
    found: list[Workspace] = []
    kept: dict[tuple[int, int], float] = {}
    views: dict[tuple[int, int], float] = {}
    for i, stage in enumerate(stages):
        if (workspace := stage.workspace) is None:
            return None
        found.append(
            Workspace(
                forward=max(workspace.forward / chunks, stage.joined * (chunks > 1)),
                again=workspace.again / chunks,
                rerun=workspace.rerun / chunks,
                backward=workspace.backward / chunks,
                half=workspace.half / chunks,
                weights=workspace.weights / chunks,
            )
        )
        kept.update({(i, j): bytes / chunks for j, bytes in stage.kept_results.items()})
        views.update({(i, j): bytes / chunks for j, bytes in stage.views.items()})
    return WhileRunning(found, loss.workspace / chunks, kept, updating, views)


def _said(node: fx.Node) -> str:
    if node.target is ops.loss:
        return LOSS
    return LOSS_BACKWARD if node.target is ops.loss_backward else ""


def _action(node: fx.Node) -> Action | None:
    """What a node does, in a step graph or, where it runs a stage, in a pipeline graph."""
    if node.op == "call_module" and ACTION not in node.meta and MICROBATCH in node.meta:
        return Action(node.meta[STAGE], Kind.FORWARD, node.meta[MICROBATCH])
    action: Action | None = node.meta.get(ACTION)
    return action


def _is_further(action: Action, before: Action | None) -> bool:
    """Whether an action's node is a further segment of the action before it."""
    is_within = action.kind is Kind.RECOMPUTE and before is not None and before.kind.begins_backward
    return action == (replace(before, kind=Kind.RECOMPUTE) if is_within and before else before)


def measured(name: str, lanes: Sequence[str], marks: Sequence[Mark]) -> Timeline:
    """The timeline of a run of a step graph, or of a pipeline graph without a backward. ``marks``
    say when each of its nodes began and ended.

    Nodes that follow each other and are segments of one action become one span; a segment that is
    recomputed within a backward is part of that. The first span begins at time 0.
    """
    spans: list[Span] = []
    for mark in marks:
        action = _action(mark.node)
        said = _said(mark.node)
        if action is not None and spans and _is_further(action, spans[-1].action):
            spans[-1] = replace(spans[-1], end=mark.end)
        elif action is not None or said:
            spans.append(Span(mark.lane, mark.start, mark.end, action, said))
    begin = min((span.start for span in spans), default=0.0)
    return Timeline(
        name,
        tuple(lanes),
        tuple(
            Span(span.lane, span.start - begin, span.end - begin, span.action, span.name)
            for span in sorted(spans, key=lambda span: (span.start, span.lane))
        ),
    )
