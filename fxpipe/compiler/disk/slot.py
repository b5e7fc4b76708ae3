"""The place of one compilation in the cache: its key, what has been found there, and what is to be
written there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from fxpipe.compiler.disk.entry import (
    CacheEntry,
    Said,
    attributes_in,
    heard,
    packed_entry,
    packed_traced,
)
from fxpipe.compiler.disk.errors import CacheWarning, NotKept, Unusable
from fxpipe.compiler.disk.folder import Folder
from fxpipe.compiler.disk.graphs import Functions
from fxpipe.compiler.disk.key import digest_of, digest_of_attributes
from fxpipe.compiler.options import Options
from fxpipe.ir.log import warn
from fxpipe.meaning.asked import Meaning
from fxpipe.trace import Traced
from fxpipe.trace.premises import Attribute

READ, WRITTEN = "from the cache", "kept in the cache"


class CacheSlot:
    """The place of one compilation in the cache. Without a folder nothing is read or written.

    Attributes:
        state: "", :data:`READ`, :data:`WRITTEN`, or why the compilation is not kept.
    """

    def __init__(self, model: nn.Module, folder: Folder | None = None) -> None:
        self.state = ""
        self._model, self._folder, self._key = model, folder, ""
        self._found = Path()
        self._own: Functions = {}
        self._said: list[Said] = []
        self._traced: Any = None

    @staticmethod
    def of(
        folder: Folder | None,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        options: Options,
        settings: Mapping[str, Any],
    ) -> CacheSlot:
        """The place for a call of a model; see :func:`digest_of`."""
        slot = CacheSlot(model, folder)
        if folder is not None:
            try:
                digest = digest_of(model, inputs, options, settings)
                slot._key, slot._own = digest.hex(), digest.functions
            except NotKept as why:
                slot._give_up(why)
        return slot

    def entry(self) -> CacheEntry | None:
        """The entry for this call and for the state that the model is in; None if there is none
        that can be used, which is warned of if a file is damaged."""
        if self._folder is None:
            return None
        for file in self._folder.files(self._key):
            try:
                entry = self._entry(file)
            except Unusable as why:
                self.refuse(why, file)
                continue
            if entry is not None:
                self._found = file
                return entry
        return None

    def _entry(self, file: Path) -> CacheEntry | None:
        """What a file has; None if it is for another state of the model's attributes."""
        assert self._folder is not None
        data = self._folder.read(file)
        try:
            state = digest_of_attributes(self._model, attributes_in(data))
            if state.hex() != data["state"]:
                return None
            return CacheEntry.of(data, {**self._own, **state.functions})
        except NotKept:
            return None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"it is not as a file of the cache is: {error!r}") from None

    def refuse(self, why: Exception, file: Path | None = None) -> None:
        """Warn that a file cannot be used, and delete it. The model is then compiled anew.

        Args:
            file: by default the file of the entry that :meth:`entry` has returned.
        """
        warn(
            f"{file or self._found}, a file of the cache, is not used: {why}; the model is "
            "compiled anew",
            CacheWarning,
        )
        with contextlib.suppress(OSError):
            (file or self._found).unlink()

    def hearing(self) -> AbstractContextManager[None]:
        """A context in which warnings are noted, so that they can be given again from the cache."""
        return nullcontext() if self._folder is None else heard(self._said)

    def note(self, traced: Traced, model: nn.Module) -> None:
        """Take note of a graph, ahead of the passes that rewrite it."""
        if self._folder is not None:
            try:
                self._traced = packed_traced(traced, model, self._own)
            except NotKept as why:
                self._give_up(why)

    def keep(self, meaning: Meaning, chunks: int | None, reads: Iterable[Attribute]) -> None:
        """Write the compilation whose graph has been noted.

        Args:
            reads: the attributes of the model's modules that the graph depends on.
        """
        if self._folder is None:
            return
        paths = {module: name for name, module in self._model.named_modules()}
        # Modules beside the model's own are part of the key, with all that they have.
        attributes = [(paths[module], name) for module, name in reads if module in paths]
        try:
            data = packed_entry(meaning, chunks, attributes, self._said, self._traced)
            data["state"] = digest_of_attributes(self._model, attributes).hex()
        except NotKept as why:
            self._give_up(why)
            return
        if self._folder.write(self._key, data["state"], data):
            self.state = WRITTEN

    def _give_up(self, why: NotKept) -> None:
        self._folder, self.state = None, f"not kept in the cache: {why}"
