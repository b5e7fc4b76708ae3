"""What a loss function shares with the stages of the model that run beside it.

::

    stage 0    hook: kept["h"] = ...     F0  F1  F2 ...
    stage 1                                  F0  L0 ...
    loss_fn    ... kept["h"] ...                 finds what the hook has left of rows 2

A loss runs in the lane of the last stage, right after that stage's forward. The stages ahead of it
have gone on to other micro-batches by then. So a loss finds there what is of another micro-batch,
where it reads what code of the user's leaves in Python objects (:mod:`fxpipe.trace.handed`); and
where it writes to a buffer that such a stage uses, or uses one to which such a stage writes (the
running statistics of a batch norm that both call), the updates come in another order than in a loop
over the micro-batches. Both use the same parameters as they like: the gradients are added up.

What a loss does is noted while it runs for a check (attributes and methods of the model, its
modules that are called, tensors), and followed from there by the names in its code.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.ir.graph import ONCE, STAGE, WRITES_STATE, attribute, stages_of
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.meaning.numbers_read import WalkToNumbers
from fxpipe.runtime.writes import WrittenMemory
from fxpipe.trace.left_behind import LeftBehind
from fxpipe.trace.outer import OuterVariable, names_in, read_by
from fxpipe.trace.premises import Reads, attributes_read, state_of, value_of

_MOST = 4096, 65536
"""How many objects are followed, and how many numbers may be among them."""


@dataclass(frozen=True)
class StagesBeside:
    """What a loss must not share with the stages ahead of the last one."""

    left: Sequence[LeftBehind] = ()
    """What code of the user's leaves in Python objects."""
    used: frozenset[int] = frozenset()
    """The memory of the parameters and buffers that these stages use, by ``memory_of``."""
    written: frozenset[int] = frozenset()
    """Of these, the memory to which they write."""

    @staticmethod
    def of(
        left: Sequence[LeftBehind], model_graph: fx.GraphModule, cut: fx.GraphModule
    ) -> StagesBeside:
        """For a model graph, and the stage graph that has been made of it.

        A model of one stage has no stage beside its loss: in its lane they take turns.
        """
        *stages, _ = stages_of(cut)
        if not stages:
            return NO_STAGES
        nodes = [node for stage in stages for node in stage.graph.nodes]
        paths = {path for node in nodes for path in node.meta.get(WRITES_STATE, ())}
        own = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
        updates = [n for n in cut.graph.nodes if ONCE in n.meta and n.meta[STAGE] < len(stages)]
        updated = [
            attribute(cut, str(each.target))
            for node in updates
            for each in node.all_input_nodes
            if each.op == "get_attr"
        ]
        written = [*(attribute(model_graph, path) for path in paths), *updated]
        written = [each for each in written if isinstance(each, Tensor)]  # it may be None by now
        return StagesBeside(
            left,
            frozenset(map(memory_of, (*own, *updated))),
            frozenset(map(memory_of, written)),
        )


NO_STAGES = StagesBeside()


class LossBeside:
    """Notes what a loss function does on a model, and tells what it shares with stages."""

    def __init__(self, model: nn.Module, loss: Any, stages: StagesBeside) -> None:
        self.model, self.loss, self.stages = model, loss, stages
        self.reads: Reads = {}
        """The attributes of the model that the loss reads, as they were then."""
        self._called: dict[nn.Module, None] = {}  # the modules whose forward it runs
        self._used: set[int] = set()  # the memory of the tensors that it computes with
        self._written: set[int] = set()  # the memory to which it writes
        self._is_known = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context in which the loss is called. Once it has returned, nothing more is noted."""
        if self._is_known:
            yield
            return
        memory = _UsedMemory()
        buffers = dict(self.model.named_buffers())
        with (
            attributes_read(self.model) as reads,
            _modules_called() as called,
            nullcontext() if self.stages is NO_STAGES else memory,
        ):
            try:
                yield
            finally:
                now = dict(self.model.named_buffers())
                replaced = {memory_of(b) for name, b in buffers.items() if now.get(name) is not b}
                self.reads = reads | self.reads
                self._called |= called
                self._used |= memory.used
                self._written |= memory.numbers | replaced
        self._is_known = True

    def left_for_it(self) -> list[tuple[str, str]]:
        """What the loss reads of what code of the user's leaves while the model runs: each in
        words, with the code."""
        if not self.stages.left:
            return []
        forwards = (vars(each).get("forward", type(each).forward) for each in self._called)
        paths = {module: f"{name}.".lstrip(".") for name, module in self.model.named_modules()}
        read = {f"{paths.get(m, '')}{name}": value_of(m, name) for m, name in self.reads}
        code = _Code([("", self.loss), *read.items(), *(("", each) for each in forwards)], paths)
        tensors = {id(buffer): name for name, buffer in self.model.named_buffers()}
        found: dict[str, str] = {}
        for left in self.stages.left:
            if isinstance(left.thing, nn.Module) and left.thing in paths:
                names = [name for name in sorted(left.names) if self._reads(left.thing, name)]
                said = [f"{paths[left.thing]}{name}" for name in names]
            elif isinstance(left.thing, Tensor):
                name = tensors.get(id(left.thing)) or code.said(left.thing)
                said = [name] if memory_of(left.thing) in self._used else []
            else:
                said = code.reads(left)
            found |= {each: left.by for each in said if each not in found}
        return list(found.items())

    def _reads(self, module: nn.Module, name: str) -> bool:
        """Whether the loss reads an attribute of the model that it has not set itself before."""
        state = self.reads.get((module, name))
        return state is not None and state == state_of(module, name)

    def shared_state(self) -> list[str]:
        """The names of the model's parameters and buffers to which the loss writes, or a stage, and
        that are used by the other."""
        stages = self.stages
        clashing = (self._written & stages.used) | (self._used & stages.written)
        own = (*self.model.named_parameters(), *self.model.named_buffers())
        return [name for name, tensor in own if memory_of(tensor) in clashing]


class _Code:
    """Code that is followed by the names in it, but not into the modules of a model: what is read
    of these has been noted, and is among the roots, which have names."""

    def __init__(self, named: Sequence[tuple[str, Any]], modules: Collection[nn.Module]) -> None:
        roots = [value for _, value in named]
        walk = WalkToNumbers.of(roots, _MOST, but=list(modules))
        callables = (v for v in walk.met if callable(v) and not isinstance(v, type))
        own = (attributes for each in callables if (attributes := getattr(each, "__dict__", None)))
        self._met, self._attributes = set(map(id, (*walk.met, *own))), walk.names
        self._variables = frozenset[str]().union(*map(names_in, roots))
        pairs = (*named, *(pair for root in roots for pair in read_by(root)))
        self._said = {id(value): name for name, value in pairs if name}

    def reads(self, left: LeftBehind) -> list[str]:
        """What the code reads of something, in words."""
        thing = left.thing
        if isinstance(thing, OuterVariable):
            return [thing.said] if thing.name in self._variables else []
        if id(thing) not in self._met:
            return []
        if isinstance(thing, nn.Module):
            return [f"{n} of a {type(thing).__name__}" for n in left.names & self._attributes]
        return [self.said(thing)]

    def said(self, value: Any) -> str:
        """A value in words: where the code finds it, if that is known."""
        return self._said.get(id(value), f"a {type(value).__name__}")


class _UsedMemory(WrittenMemory):  # type: ignore[no-untyped-call]
    """Notes the memory of all tensors that operators are given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used.update(map(memory_of, tensors_of((args, kwargs))))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _modules_called() -> Iterator[dict[nn.Module, None]]:
    """Yields the modules whose forward runs in this thread inside the ``with`` block: a dictionary
    that grows."""
    called: dict[nn.Module, None] = {}
    thread = threading.get_ident()

    def note(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            called[module] = None

    handle = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()
