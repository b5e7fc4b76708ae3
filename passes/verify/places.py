"""Checks where nodes run: a stage is in one lane, a lane on one device, and each node on the stream
of that device which its function uses.

::

    node                            lane   device   stream
    copy_s1_mb0  = copy(...)        1      cuda:1   cuda:1/copy
    wait_s1_mb0  = wait(...)        1      cuda:1   cuda:1
    stage_1_mb0  = stage_1(...)     1      cuda:1   cuda:1
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, LANE, STAGE, STREAM
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name
from passes.verify.errors import VerifyError
from passes.verify.values import lane_of

CARRIERS = (ops.copy, ops.portal_copy, ops.send)
TRANSFERS = (ops.transmit, ops.receive, ops.arrived)
BRINGING = (ops.bring, ops.replicate)
NAMING_STREAMS = {*CARRIERS, *BRINGING, ops.wait}  # the functions whose arguments name two streams
LEAVING = {ops.offload, ops.offloaded}  # those that name the stream from which activations move


class Places:
    """The lanes of stages and the devices of lanes, as the nodes of a graph note them.

    ``lanes``: by a stage, a node of the stage, which notes the stage's lane.
    """

    def __init__(self, graph: fx.Graph, lanes: dict[int, fx.Node]) -> None:
        self._devices: dict[int, tuple[fx.Node, str]] = {}  # by lane: a node there, the device
        self._lanes = lanes
        self._has_streams = any(STREAM in node.meta for node in graph.nodes)
        self._checked: dict[Hashable, int] = {}  # by what is noted of a node: its lane

    def lane(self, node: fx.Node) -> int:
        """The lane that runs a node, whose notes are checked: the lane is on one device, and the
        node's stream is one of that device, of the kind that the node's function uses.

        Of nodes for which all of this is the same, the first one is checked."""
        note, function = node.meta.get, node.target
        named = 2 if function in NAMING_STREAMS else int(function in LEAVING)
        streams = node.args[1 : 1 + named]
        place = note(STAGE), note(LANE), note(DEVICE), note(STREAM), function, streams
        lane = self._checked.get(place)
        if lane is None:
            lane = self._checked[place] = lane_of(node)
            if STAGE in node.meta:
                self._check(node, lane)
        return lane

    def _check(self, node: fx.Node, lane: int) -> None:
        if (STREAM in node.meta) != self._has_streams:
            raise VerifyError(
                "either all nodes of stages are noted on a device and a stream, or none: give "
                'node.meta["device"] and node.meta["stream"]',
                node,
            )
        if DEVICE not in node.meta:
            return
        known_to_be = self._lanes.setdefault(node.meta[STAGE], node)
        if lane_of(known_to_be) != lane:
            raise VerifyError(
                f"stage {node.meta[STAGE]} is in lane {lane_of(known_to_be)}, and this node in "
                f"lane {lane}",
                node,
                known_to_be,
            )
        device = str(node.meta[DEVICE])
        first, known = self._devices.setdefault(lane, (node, device))
        if known != device:
            raise VerifyError(
                f"stages of one lane are on two devices, {known} and {device}", node, first
            )
        if node.target in TRANSFERS:
            return
        role = COPY if node.target in CARRIERS else COMPUTE
        if STREAM in node.meta and node.meta[STREAM] != (own := stream_name(device, role)):
            raise VerifyError(
                f"it belongs to the stream {own!r}, and is noted on another one", node
            )
        if node.target in NAMING_STREAMS:
            self._check_streams(node, device)
        if node.target in LEAVING and node.args[1] != (own := stream_name(device, COMPUTE)):
            raise VerifyError(
                f"activations move to the host from {own!r}, which it computes on", node
            )

    def device_of(self, lane: int) -> str | None:
        """The device of a lane; None if no node of it has been visited."""
        return self._devices[lane][1] if lane in self._devices else None

    def _check_streams(self, node: fx.Node, device: str) -> None:
        """Check that the streams that a node names are those of the device where it is."""
        source, target = map(str, node.args[1:3])
        compute, copy = stream_name(device, COMPUTE), stream_name(device, COPY)
        if node.target is ops.wait:
            if (source, target) not in ((compute, copy), (copy, compute)):
                raise VerifyError(f"a wait of this stage is between {compute!r} and {copy!r}", node)
        elif node.target in BRINGING:
            if (source, target) != (copy, compute):
                raise VerifyError(
                    f"a parameter is brought on {copy!r}, to be used on {compute!r}", node
                )
        elif target != copy:
            raise VerifyError(f"what this node brings has to go to the stream {copy!r}", node)
