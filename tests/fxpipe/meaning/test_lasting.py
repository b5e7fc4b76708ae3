"""Of the states that a forward changes, those are found on which an output depends."""

from __future__ import annotations

from itertools import islice

from fxpipe.meaning.lasting import that_matter


def found(names, *sets):
    """Those that matter, where an output depends on each of these sets of names."""
    return list(that_matter(names, lambda some: any(set(each) <= set(some) for each in sets)))


def test_each_name_that_matters_is_found_and_no_other():
    assert found("abcdefgh", "c") == ["c"]
    assert found("abcdefg", "a", "d", "g") == ["a", "d", "g"]
    assert found("a", "a") == ["a"]


def test_names_that_matter_only_together_are_found_with_what_lies_between():
    assert found("abcd", "ab") == ["a", "b"]
    assert found("abcd", "ad") == ["a", "b", "c", "d"]


def test_no_more_is_tried_than_the_names_that_are_wanted_need():
    tried = []
    names = that_matter(range(64), lambda some: tried.append(some) or True)
    assert list(islice(names, 2)) == [0, 1]
    assert len(tried) < 10
