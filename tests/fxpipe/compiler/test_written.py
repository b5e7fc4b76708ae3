"""Calls as text."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe.compiler.written import WrittenCall, written
from fxpipe.ir.devices import KNOWN


def takes(model, devices=None, *, chunks=None, loss_fn=None, schedule="gpipe", pins=None):
    return model, devices, chunks, loss_fn, schedule, pins


def call(model, devices=None, *, chunks=None, loss_fn=None, schedule="gpipe", pins=None):
    return WrittenCall.of(takes, "takes", locals())


def test_arguments_are_written_as_literals_and_others_by_their_names():
    text = str(call(nn.ReLU(), [torch.device("cpu"), "cpu"], chunks=4, loss_fn=nn.MSELoss()))
    assert text == 'takes(model, ["cpu", "cpu"], chunks=4, loss_fn=loss_fn)'
    assert str(call(nn.ReLU(), ("cpu",), pins={"a": 0})) == 'takes(model, ("cpu",), pins={"a": 0})'
    assert str(call(nn.ReLU(), (), pins={"a": X})) == "takes(model, (), pins=pins)"


X = object()


def test_what_is_as_by_default_is_left_out():
    assert str(call(nn.ReLU(), None, schedule="".join(["g", "pipe"]))) == "takes(model)"


def test_values_that_this_project_makes_are_written_as_the_call_that_makes_them():
    tokens = fxpipe.loss_weight.tokens("y", ignore_index=0)
    assert written("loss_weight", tokens) == ('fxpipe.loss_weight.tokens(name="y", ignore_index=0)')
    assert eval(written("loss_weight", tokens)) == tokens
    assert written("loss_weight", fxpipe.loss_weight.tokens()) == "fxpipe.loss_weight.tokens()"
    auto = fxpipe.Auto(pins={"a": 1}, boundaries=["layers.*"])
    assert eval(written("partition", auto)) == auto
    assert written("partition", fxpipe.Auto(devices=[KNOWN["h100"]])) == "partition"


def test_long_literals_are_left_to_the_user():
    assert str(call(nn.ReLU(), ["cpu"] * 20)) == "takes(model, devices)"


def test_options_are_changed_added_and_left_out():
    changed = call(nn.ReLU(), chunks=2, schedule="1f1b").with_options(chunks=8, pins=[1])
    assert str(changed) == 'takes(model, chunks=8, schedule="1f1b", pins=[1])'
    assert str(changed.with_options(schedule=None)) == "takes(model, chunks=8, pins=[1])"
    assert str(changed) == str(changed.with_options()), "the call itself stays as it is"
