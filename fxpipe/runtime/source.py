"""A lane's instructions, written out as the source of one Python function.

::

    def lane(call, values, time):
        arrived, take, post_0 = call.inboxes[1].arrived, call.inboxes[1].take, call.inboxes[0].post
        if node_3 not in arrived: yield node_3
        copy_s1_mb0 = take(node_3)
        if call.error is not None: call.drop()
        stage_1_mb0 = function_4(copy_s1_mb0)
        del copy_s1_mb0
        post_0(node_4, stage_1_mb0)
        ...

Values are local variables, and constants are written into the calls. So a run does not look up in
its graph what to call with what, which would take longer than many operators do.

A lane that takes values of others is a generator: it yields the node whose value it waits for, and
its thread may run another lane until that value is there.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import getitem
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxpipe.ir.graph import DEVICE, mutable
from fxpipe.runtime.notes import where

_LITERALS = (type(None), bool, int, str)
Part = Generator[fx.Node, None, Any]
"""A lane's part of a run. It yields each node whose value it waits for, and returns the program's
output if the lane has that."""

_numbers = count()  # of the functions, so that each has a file name of its own


@dataclass
class Instruction:
    """One node of the graph, as a call that a lane runs.

    ``function`` is what the node calls. For a node that stands for a module of the graph
    (``get_attr``) it is the module, and nothing is called.
    """

    node: fx.Node
    function: Any
    awaits: tuple[fx.Node, ...] = ()  # values from other lanes that this lane does not have yet
    posts: tuple[int, ...] = ()  # other lanes that need the node's value
    forgets: tuple[fx.Node, ...] = ()  # values that this lane does not need any more

    @property
    def device(self) -> torch.device | None:
        """The accelerator of the node's stage; None for the CPU."""
        device: torch.device | None = self.node.meta.get(DEVICE)
        return None if device is None or device.type == "cpu" else device


class LaneFunction:
    """The function that runs a lane's instructions.

    Args:
        lane: the lane's number.
        instructions: those of the lane, in order.
        inputs: the nodes whose values are given when the function is called.
        alone: whether no other lane takes part, so that this one runs the instructions of all
            devices, and no other lane can fail.
        timed: whether the function takes the time of each instruction.
    """

    def __init__(
        self,
        lane: int,
        instructions: Sequence[Instruction],
        inputs: Iterable[fx.Node] = (),
        *,
        alone: bool = False,
        timed: bool = False,
    ) -> None:
        source = _Source(lane, instructions, list(inputs), alone, timed)
        self._nodes = source.nodes
        self._waits = any(each.awaits for each in instructions)
        text = "\n".join(source.lines)
        # A traceback finds the source by the loader of the function's module.
        filename = f"<fxpipe lane {lane}>.{next(_numbers)}"
        names = {**source.constants, "__name__": filename, "__loader__": _Loader(text)}
        exec(compile(text, filename, "exec"), names)
        self._function: Callable[..., Any] = names["lane"]

    def __call__(self, call: Any, values: Sequence[Any] = (), time: Any = None) -> Any:
        """Run the instructions of a lane that takes no values of others, and return the program's
        output if the lane has its node.

        An exception gets a note that says at which node, and line of the model, it was raised.

        Args:
            call: the call of the program. It has the ``inboxes`` of the lanes and the ``error`` of
                a lane that has failed; ``drop()`` raises an exception, which ends the lane's part;
                ``on(device)`` is a context with that current device. A function that runs alone
                enters it once for all neighbouring instructions of a device.
            values: those of the inputs.
            time: a function that is called with each node and a function that computes the node's
                value, and returns that value.
        """
        try:
            return self._function(call, values, time)
        except BaseException as error:
            self._note(error)
            raise

    def part(self, call: Any, values: Sequence[Any] = (), time: Any = None) -> Part:
        """As :meth:`__call__`, for any lane: the instructions run while the generator goes on.

        An exception becomes that of the call (``call.fail(error)``), and the generator raises what
        ``call.drop()`` raises.
        """
        try:
            result = self._function(call, values, time)
            return (yield from result) if self._waits else result
        except GeneratorExit:
            raise
        except BaseException as error:
            self._note(raised := self._raised(error))
            call.fail(raised)
            del raised
            call.drop()

    def _raised(self, error: BaseException) -> BaseException:
        """What a node has raised, by the error that the generator has raised: a StopIteration, by
        which generators end, leaves them as the cause of a RuntimeError of their own."""
        cause, innermost = error.__cause__, error.__traceback__
        if type(error) is not RuntimeError or not isinstance(cause, StopIteration):
            return error
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        generators = self._function.__code__, LaneFunction.part.__code__
        is_turned = innermost is not None and innermost.tb_frame.f_code in generators
        return cause if is_turned else error

    def _note(self, error: BaseException) -> None:
        line = self._line(error)
        node = None if line is None else self._nodes[line.tb_lineno - 1]
        if node is not None:
            error.add_note(where(node, error))

    def _line(self, error: BaseException) -> TracebackType | None:
        """Where the error has left the function; None if it was not there."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._function.__code__:
            trace = trace.tb_next
        return trace


class _Loader:
    """Gives the source of a function to tracebacks, as the loader of a module would."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


class _Source:
    """The lines of a lane's function, and the constants that they name."""

    def __init__(
        self,
        lane: int,
        instructions: Sequence[Instruction],
        inputs: list[fx.Node],
        alone: bool,
        timed: bool,
    ) -> None:
        self.lines: list[str] = []
        self.nodes: list[fx.Node | None] = []  # for each line, the node whose value it computes
        self.constants: dict[str, Any] = {}
        self._named: dict[int, str] = {}  # the names of constants, by their ids
        self._alone, self._timed = alone, timed
        self._device: torch.device | None = None  # that of the block which is being written
        self._indent = " " * 4
        self._taken = {node.name for node in inputs}
        for each in instructions:
            self._taken |= {each.node.name, *(node.name for node in each.node.all_input_nodes)}
        call, values, time = map(self._new, ("call", "values", "time"))
        self._call, self._time = call, time
        self._arrived, self._take = self._new("arrived"), self._new("take")
        others = dict.fromkeys(other for each in instructions for other in each.posts)
        self._posts = {
            other: self._new("post_caller" if other < 0 else f"post_{other}") for other in others
        }

        self._line(f"def lane({call}, {values}, {time}):")
        if any(each.awaits for each in instructions):
            self._line(f"    {self._arrived} = {call}.inboxes[{lane}].arrived")
            self._line(f"    {self._take} = {call}.inboxes[{lane}].take")
        for other, post in self._posts.items():
            self._line(f"    {post} = {call}.inboxes[{other}].post")
        if inputs:
            self._line(f"    {', '.join(node.name for node in inputs)}, = {values}")
        self._line(f"    del {values}")
        for each in instructions:
            self._write(each)

    def _write(self, instruction: Instruction) -> None:
        node, name = instruction.node, instruction.node.name
        is_call = node.op != "get_attr" and instruction.function is not getitem
        # The value that is made last first: when it is there, so are the others, most likely.
        for awaited in reversed(instruction.awaits):
            key = self._constant("node", awaited)
            self._write_line(f"if {key} not in {self._arrived}: yield {key}")
            self._write_line(f"{awaited.name} = {self._take}({key})")
        value = self._value(instruction)
        if is_call and self._alone:
            self._begin_on(instruction.device)
        elif is_call:
            self._write_line(f"if {self._call}.error is not None: {self._call}.drop()")
        if self._timed:
            value = f"{self._time}({self._constant('node', node)}, lambda: {value})"
        self._write_line(f"{name} = {value}", node)
        for other in instruction.posts:
            self._write_line(f"{self._posts[other]}({self._constant('node', node)}, {name})")
        if instruction.forgets:
            self._write_line(f"del {', '.join(node.name for node in instruction.forgets)}")
        if node.op == "output":
            self._write_line(f"return {name}")

    def _begin_on(self, device: torch.device | None) -> None:
        """Begin a block with this current device, unless it is that of the block before: to make a
        device the current one takes longer than many calls do."""
        if device == self._device:
            return
        self._device, self._indent = device, " " * 4
        if device is not None:
            self._write_line(f"with {self._call}.on({self._constant('device', device)}):")
            self._indent = " " * 8

    def _value(self, instruction: Instruction) -> str:
        """The expression that computes an instruction's value."""
        node, function = instruction.node, instruction.function
        if node.op == "get_attr" and isinstance(function, nn.Module):
            return self._constant("module", function)
        if function is getitem:
            of, index = map(self._expression, node.args)
            return f"{of}[{index}]"
        args = [self._expression(each) for each in node.args]
        args += [f"{name}={self._expression(each)}" for name, each in node.kwargs.items()]
        return f"{self._constant('function', function)}({', '.join(args)})"

    def _expression(self, argument: Any) -> str:
        """The expression for an argument of a node: nodes are local variables."""
        if isinstance(argument, fx.Node):
            return argument.name
        if type(argument) in _LITERALS:
            return repr(argument)
        if type(argument) is tuple:
            return f"({''.join(f'{self._expression(each)}, ' for each in argument)})"
        # Those of a graph are of types of fx that cannot be written to. What is called may write to
        # lists and dicts that it is given, which are made anew for each call.
        if type(argument) in (list, immutable_list):
            return f"[{', '.join(map(self._expression, argument))}]"
        if type(argument) in (dict, immutable_dict):
            keys = map(self._expression, argument)
            values = map(self._expression, argument.values())
            return f"{{{', '.join(f'{k}: {v}' for k, v in zip(keys, values, strict=True))}}}"
        found: list[fx.Node] = []
        fx.map_arg(argument, found.append)
        if not found:
            return self._constant("constant", argument)
        nodes = list(dict.fromkeys(found))

        def filled(*values: Any) -> Any:
            return mutable(fx.map_arg(argument, dict(zip(nodes, values, strict=True)).__getitem__))

        names = ", ".join(node.name for node in nodes)
        return f"{self._constant('filled', filled)}({names})"

    def _constant(self, kind: str, value: Any) -> str:
        """The name under which the lane's function finds a constant among its globals."""
        if id(value) not in self._named:
            self._named[id(value)] = name = self._new(f"{kind}_{len(self._named)}")
            self.constants[name] = value
        return self._named[id(value)]

    def _new(self, name: str) -> str:
        """A name that no value of the graph has."""
        while name in self._taken or keyword.iskeyword(name):
            name += "_"
        self._taken.add(name)
        return name

    def _write_line(self, text: str, node: fx.Node | None = None) -> None:
        """Write a line of the present block."""
        self._line(f"{self._indent}{text}", node)

    def _line(self, text: str, node: fx.Node | None = None) -> None:
        self.lines.append(text)
        self.nodes.append(node)
