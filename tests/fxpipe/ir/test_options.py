"""What is said of an option that a function does not take."""

from __future__ import annotations

import inspect

import pytest

from fxpipe.ir.options import meant, options_checked


def cut(model, *, chunks=1, stages=1):
    return model, chunks, stages


@options_checked(cut)
def search(model, *, rounds=1, **options):
    return rounds, cut(model, **options)


def test_options_that_are_taken_are_passed_on():
    assert search("net", rounds=3, chunks=2) == (3, ("net", 2, 1))
    assert search(model="net") == (1, ("net", 1, 1)), "a positional one may be given by its name"


@pytest.mark.parametrize("given, name", [("round", "rounds"), ("chunk", "chunks")])
def test_a_misspelled_option_is_named_also_one_that_would_be_passed_on(given, name):
    with pytest.raises(TypeError) as raised:
        search("net", **{given: 2})
    assert str(raised.value) == f"search takes no option {given!r}: did you mean {name!r}?"


@pytest.mark.parametrize("given", ["microbatches", "num_microbatches", "micro_batches", "n_chunks"])
def test_the_name_that_others_have_for_an_option_leads_to_it(given):
    with pytest.raises(TypeError) as raised:
        search("net", **{given: 4})
    assert str(raised.value).endswith(": did you mean 'chunks'?")


def test_an_option_like_no_other_gives_the_list():
    with pytest.raises(TypeError) as raised:
        search("net", color="blue")
    said = "search takes no option 'color': give some of model, rounds, chunks, stages"
    assert str(raised.value) == said


def test_a_further_argument_without_a_name_is_refused_with_what_to_write():
    with pytest.raises(TypeError) as raised:
        search("net", {"x": 1})
    said = "search takes model by place, and is given a dict beyond that: give everything else by "
    assert str(raised.value) == f"{said}its name"

    @options_checked()
    def traced(model, *, example_kwargs=None): ...

    with pytest.raises(TypeError, match=r"by its name, such as example_kwargs=\{\.\.\.\}$"):
        traced("net", {"x": 1})


def test_the_signature_stays():
    assert str(inspect.signature(search)) == "(model, *, rounds=1, **options)"


def test_nothing_is_meant_where_nothing_is_alike():
    assert meant("clip_grad_norm", ["target", "max_grad_norm"]) == "max_grad_norm"
    assert meant("lr", ["target", "max_grad_norm"]) is None
