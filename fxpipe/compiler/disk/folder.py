"""The files of the cache. Each has a digest of its content in its first line.

A file is written beside its place, and then moved there at once, so that other processes see it
whole or not at all. Two processes that write the same file write the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fxpipe.compiler.disk.errors import CacheWarning, Unusable
from fxpipe.ir.log import warn

MANY = 16
"""The most files of one key that are read."""

LONG = 64
"""A list of more elements is encoded one element after the other."""


class Folder:
    """A folder with a folder for each key, which has a file for each state of the model's
    attributes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def files(self, key: str) -> list[Path]:
        """The files of a key, the latest first; at most :data:`MANY`."""
        with contextlib.suppress(OSError):
            files = [(file.stat().st_mtime, file) for file in (self.path / key).glob("*.json")]
            return [file for _, file in sorted(files, reverse=True)[:MANY]]
        return []

    def read(self, file: Path) -> Any:
        """What has been written to a file.

        Raises:
            Unusable: if the file is damaged, or cannot be read.
        """
        try:
            content = file.read_bytes()
        except OSError as error:
            raise Unusable(f"it cannot be read: {error}") from None
        known, _, rest = content.partition(b"\n")
        if known != hashlib.sha256(rest).hexdigest().encode():
            raise Unusable("it is damaged: its digest is not that of its content")
        try:
            return json.loads(rest)
        except (ValueError, RecursionError) as error:
            raise Unusable(f"it is no JSON: {error}") from None

    def write(self, key: str, name: str, data: Any) -> bool:
        """Write a file of a key; warn and return False if that is impossible."""
        made = ""
        try:
            (self.path / key).mkdir(parents=True, exist_ok=True)
            number, made = tempfile.mkstemp(dir=self.path / key, prefix=".", suffix=".tmp")
            with os.fdopen(number, "wb") as file:
                digest = hashlib.sha256()
                file.write(digest.hexdigest().encode() + b"\n")  # to be written over
                for piece in _encoded(data):
                    digest.update(piece)
                    file.write(piece)
                file.seek(0)
                file.write(digest.hexdigest().encode())
            os.replace(made, self.path / key / f"{name}.json")
        except OSError as error:
            if made:
                with contextlib.suppress(OSError):
                    os.unlink(made)
            warn(
                f"the compilation is not kept, as nothing can be written to {self.path}: {error}",
                CacheWarning,
            )
            return False
        return True


def _encoded(data: Any) -> Iterator[bytes]:
    """JSON in pieces: the encoder of the standard library makes a string of each number and each
    bracket before it joins them, which takes ten times the memory of the text."""
    if isinstance(data, dict):
        yield from _within(b"{", b"}", ([_encoded_whole(key), b":"] for key in data), data.values())
    elif isinstance(data, list) and len(data) > LONG:
        yield from _within(b"[", b"]", ([] for _ in data), data)
    else:
        yield _encoded_whole(data)


def _within(
    begin: bytes, end: bytes, ahead: Iterable[list[bytes]], values: Iterable[Any]
) -> Iterator[bytes]:
    yield begin
    for number, (keys, value) in enumerate(zip(ahead, values, strict=True)):
        yield b"," if number else b""
        yield from keys
        yield from _encoded(value)
    yield end


def _encoded_whole(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
