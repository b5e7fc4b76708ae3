"""What is in a container is recorded, compared and put back without running code of its class."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest

from fxpipe.runtime.state import State, contents_of, same_entries


class MakesWhatItIsAskedFor(OrderedDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def values(self) -> Any:
        raise AssertionError("this is not to be called")


def recorded(value: Any) -> State:
    state = State(())
    state.look_into(value)
    return state


def test_a_table_is_looked_into_and_not_asked() -> None:
    table = MakesWhatItIsAskedFor(a=list, b=dict)
    state = recorded(table)
    assert contents_of(table) == {"a": list, "b": dict} and not state.differs(table)
    table["b"] = set
    assert state.differs(table)
    state.put_back()
    assert contents_of(table) == {"a": list, "b": dict} and list(table) == ["a", "b"]


@pytest.mark.parametrize("is_moved_before", [False, True])
def test_an_ordered_dictionary_has_again_the_order_that_it_had(is_moved_before: bool) -> None:
    table = OrderedDict(a=1000, b=2000, c=3000)
    if is_moved_before:
        table.move_to_end("b")
    before, state = list(table), recorded(table)
    assert not state.differs(table) and same_entries(table, contents_of(table))
    table.move_to_end("a")
    assert not same_entries(table, dict.fromkeys(before) | table)
    state.put_back()
    assert list(table) == before and not state.differs(table)


@pytest.mark.parametrize("container", [{"a": 1}, [1, 2], {1, 2}, deque([1, 2])])
def test_other_containers_have_again_what_they_had(container: Any) -> None:
    before, state = type(container)(container), recorded(container)
    container.clear()
    assert state.differs(container)
    state.put_back()
    assert container == before
