"""The files of the cache: what is written is read again, and what is damaged is not."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from fxpipe.compiler.disk.errors import Unusable
from fxpipe.compiler.disk.folder import LONG, Folder, _encoded

DATA = {
    "empty": [{}, [], "", None],
    "nested": {"ä": [True, 1.5, {"a": [[]] * (LONG + 1)}], "b": {}},
    "long": [[number, {"text": f"{number}"}] for number in range(3 * LONG)],
}


def test_what_is_written_is_read_again(tmp_path):
    folder = Folder(tmp_path)
    assert folder.write("key", "name", DATA)
    (file,) = folder.files("key")
    assert folder.read(file) == DATA and file.name == "name.json"
    assert [each.name for each in file.parent.iterdir()] == ["name.json"], "and nothing beside it"


def test_a_file_that_has_changed_is_not_read(tmp_path):
    folder = Folder(tmp_path)
    folder.write("key", "name", DATA)
    (file,) = folder.files("key")
    file.write_bytes(file.read_bytes().replace(b"1.5", b"2.5"))
    with pytest.raises(Unusable, match="it is damaged"):
        folder.read(file)


def test_it_is_encoded_as_a_whole_would_be_in_a_small_part_of_the_memory():
    whole = json.dumps(DATA, separators=(",", ":")).encode()
    assert b"".join(_encoded(DATA)) == whole
    much = {"long": [[1, 2, "three"] * 10] * 10_000}
    tracemalloc.start()
    size = sum(map(len, _encoded(much)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 20
