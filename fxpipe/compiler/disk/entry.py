"""What is kept of one compilation: the meaning of the call, the model graph, what the graph depends
on, and the warnings that the compilation has given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.compiler.disk.data import packed, unpacked
from fxpipe.compiler.disk.errors import NotKept, Unusable
from fxpipe.compiler.disk.graphs import Functions, packed_graph, unpacked_graph
from fxpipe.compiler.disk.key import Attributes
from fxpipe.compiler.disk.relations import packed_sizes, unpacked_sizes
from fxpipe.ir.graph import VALUE
from fxpipe.ir.hooks import RECORDING
from fxpipe.ir.log import each_once, line_of_the_user, warn
from fxpipe.ir.structure import Structure
from fxpipe.meaning.asked import Meaning
from fxpipe.meaning.errors import BatchWarning
from fxpipe.runtime.state import STATEFUL
from fxpipe.trace import Traced, traced_before
from fxpipe.trace.example import Example
from fxpipe.trace.premises import Reads, state_of

_CATEGORIES = {kind.__name__: kind for kind in (BatchWarning, FutureWarning, RuntimeWarning)}


@dataclass(frozen=True)
class Said:
    """A warning that a compilation has given, for a line of a file. Without a file it is for the
    line of the user's that has led to the compilation, which is another one in another process."""

    text: str
    category: type[Warning]
    file: str
    line: int

    @staticmethod
    def of(caught: warnings.WarningMessage, users: tuple[str, int]) -> Said:
        """A warning that has been caught where ``users`` is the line of the user's."""
        place = caught.filename, caught.lineno
        return Said(str(caught.message), caught.category, *(("", 0) if place == users else place))

    def again(self) -> None:
        """Warn in this process as the process did that compiled the model."""
        if self.file:
            warnings.warn_explicit(self.text, self.category, self.file, self.line)
        else:
            warn(self.text, self.category)


@contextmanager
def heard(said: list[Said]) -> Iterator[None]:
    """Warnings that are given inside the ``with`` block are added to a list, and given again at its
    end, to the user's own filters."""
    caught: list[Any] = []
    users = line_of_the_user()
    try:
        with warnings.catch_warnings(record=True) as caught, each_once(None):
            warnings.simplefilter("always")
            yield
    finally:
        new = [Said.of(each, users) for each in caught]
        said += new
        for each in new:
            each.again()


# ----------------------------------------------------------------------------------- model graphs


def packed_traced(traced: Traced, model: nn.Module, own: Functions) -> Any:
    """What tracing ``model`` has come to as JSON. It has to be asked for ahead of the passes, which
    rewrite the graph.

    Raises NotKept for a graph that cannot be kept.
    """
    paths = {module: name for name, module in model.named_modules()}
    if traced.front_end == "custom":
        raise NotKept("a tracer of the user's own has traced it")
    if traced.folded:
        raise NotKept("its graph has constants that are computed from tensors of the model")
    if any(module in STATEFUL for module in paths):
        raise NotKept("it has modules that change a state of their own")
    if model in RECORDING:
        raise NotKept("it has hooks that record values for its outputs")
    return {
        "front_end": traced.front_end,
        "graph": packed_graph(traced.graph_module, model, own),
        "is_rebuilt": _is_rebuilt(traced),
        "sizes": packed_sizes(traced.sizes),
        "largest_batch": traced.largest_batch,
        "refused_sizes": sorted(traced.refused_sizes),
        "settled": [[paths[m], n, packed(value)] for (m, n), value in traced.settled.items()],
        "may_lose_gradients": traced.may_lose_gradients,
        "tried": list(traced.tried),
    }


def unpacked_traced(data: Any, own: Functions, example: Example, output: Structure) -> Traced:
    """What :func:`packed_traced` has made JSON of, for the model of this example.

    Args:
        output: the structure of the model's output.

    Raises Unusable, or another error, if the file says what the model does not have.
    """
    model, front_end = example.model, str(data["front_end"])
    is_symbolic = front_end == "symbolic"
    gm = unpacked_graph(data["graph"], model, own, on_the_model=is_symbolic)
    return Traced(
        gm,
        front_end,
        example.binder(),
        output.fill if data["is_rebuilt"] else _as_it_is,
        largest_batch=int(data["largest_batch"]),
        refused_sizes=frozenset(map(int, data["refused_sizes"])),
        sizes=unpacked_sizes(data["sizes"]),
        settled={
            (model.get_submodule(path), str(name)): unpacked(value)
            for path, name, value in data["settled"]
        },
        may_lose_gradients=bool(data["may_lose_gradients"]),
        tried=tuple(map(str, data["tried"])),
    )


def _as_it_is(output: Any) -> Any:
    return output


def _is_rebuilt(traced: Traced) -> bool:
    """Whether a graph returns a list of tensors, of which the model's output is rebuilt.

    Raises NotKept if the list has numbers as well: how these are nested is not seen from an output.
    """
    if not isinstance(getattr(traced.rebuild, "__self__", None), Structure):
        if traced.front_end != "symbolic":
            raise NotKept("its output is put together in a way of its own")
        return False
    if traced.front_end != "symbolic":
        parts = traced.graph_module.graph.output_node().args[0]
        assert isinstance(parts, Iterable)
        for part in parts:
            if not (isinstance(part, fx.Node) and isinstance(part.meta.get(VALUE), Tensor)):
                raise NotKept("it returns numbers that depend on the sizes of its inputs")
    return True


# ----------------------------------------------------------------------------------- whole entries


@dataclass(frozen=True)
class CacheEntry:
    """What has been read of one compilation.

    Args:
        meaning: how the call is cut into micro-batches.
        chunks: as in :class:`fxpipe.compiler.compiled.Mode`.
        attributes: the attributes that the graph depends on: the paths of modules, and names.
        said: the warnings to give again.
        make: makes the graph for an example, and for the structure of the model's output.
    """

    meaning: Meaning
    chunks: int | None
    attributes: Attributes
    said: Sequence[Said]
    make: Callable[[Example, Structure], Traced]

    @staticmethod
    def of(data: Any, own: Functions) -> CacheEntry:
        """The entry that :func:`packed_entry` has made JSON of."""
        meaning, chunks = data["meaning"], data["chunks"]
        return CacheEntry(
            Meaning(
                in_dims=unpacked(meaning["in_dims"]),
                outputs=unpacked(meaning["outputs"]),
                is_checked=bool(meaning["is_checked"]),
                differing=frozenset(map(str, meaning["differing"])),
                unclear=unpacked(meaning["unclear"]),
                notes=unpacked(meaning["notes"]),
                one_row_only=bool(meaning["one_row_only"]),
                refused_sizes=frozenset(map(int, meaning["refused_sizes"])),
                goes_by_size=bool(meaning["goes_by_size"]),
            ),
            None if chunks is None else int(chunks),
            attributes_in(data),
            [
                Said(str(text), _CATEGORIES.get(kind, UserWarning), str(file), int(line))
                for text, kind, file, line in data["said"]
            ],
            partial(unpacked_traced, data["traced"], own),
        )

    def meaning_for(self, tensors: Sequence[Tensor]) -> Meaning:
        """The meaning of a call with these tensors. Raises Unusable if it is that of another."""
        dims = self.meaning.in_dims
        fits = len(dims) == len(tensors) and all(
            dim is None or (isinstance(dim, int) and 0 <= dim < tensor.ndim)
            for dim, tensor in zip(dims, tensors, strict=True)
        )
        if not fits:
            raise Unusable("it is for a call with other tensors")
        return self.meaning

    def traced_on(
        self,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        **settings: Any,
    ) -> Traced:
        """The graph for a model, once it has been run beside it; ``settings`` are those of
        :func:`fxpipe.trace.traced_before`.

        Raises Unusable if it does not give what the model gives, or names what it does not have.
        """
        try:
            return traced_before(model, *inputs, self.make, **settings)
        except Unusable:
            raise
        except Exception as error:  # whatever the file says: the model is compiled anew
            raise Unusable(f"{type(error).__name__}: {error}") from error

    def reads(self, model: nn.Module) -> Reads:
        """The attributes that the graph depends on, with their states in this model."""
        owners = [(model.get_submodule(path), name) for path, name in self.attributes]
        return {(owner, name): state_of(owner, name) for owner, name in owners}


def attributes_in(data: Any) -> Attributes:
    """The attributes on which the graph of an entry depends."""
    return [(str(path), str(name)) for path, name in data["attributes"]]


def packed_entry(
    meaning: Meaning,
    chunks: int | None,
    attributes: Attributes,
    said: Iterable[Said],
    traced: Any,
) -> Any:
    """A compilation as JSON.

    Args:
        attributes: those that the graph depends on.
        traced: what :func:`packed_traced` has given.

    Raises NotKept for a compilation that cannot be kept.
    """
    if meaning.listed is not None:
        raise NotKept("its inputs are lists with one element for each row")
    return {
        "meaning": {
            "in_dims": packed(list(meaning.in_dims)),
            "outputs": packed(meaning.outputs),
            "is_checked": meaning.is_checked,
            "differing": sorted(meaning.differing),
            "unclear": packed(meaning.unclear),
            "notes": packed(meaning.notes),
            "one_row_only": meaning.one_row_only,
            "refused_sizes": sorted(meaning.refused_sizes),
            "goes_by_size": meaning.goes_by_size,
        },
        "chunks": chunks,
        "attributes": [list(each) for each in attributes],
        "said": [[each.text, each.category.__name__, each.file, each.line] for each in said],
        "traced": traced,
    }
