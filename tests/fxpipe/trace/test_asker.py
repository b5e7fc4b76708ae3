"""Who asks: only the model's own code counts, in the thread that traces it."""

from __future__ import annotations

import logging
import sys
import threading

import torch
from torch import nn

from fxpipe.trace.asker import asks_for_a_class, by_the_model, is_called_by_a_model


def frame_in_torch(run):
    """What ``run`` gives of the frame of PyTorch's that calls it."""
    found = []

    class Called(nn.Module):
        def forward(self):
            found.append(run(sys._getframe(1)))

    Called()()
    return found[0]


def test_the_models_own_code_asks_and_pytorchs_does_not():
    asks = by_the_model()
    assert asks(sys._getframe())
    assert not frame_in_torch(asks)


def test_layers_may_count_as_well():
    frames = []
    nn.TransformerEncoderLayer(4, 1, activation=lambda h: frames.append(sys._getframe(1)) or h)(
        torch.randn(2, 3, 4)
    )
    assert [by_the_model(layers=True)(f) for f in frames] == [True]
    assert [by_the_model()(f) for f in frames] == [False]


def test_no_other_thread_asks():
    asks, found = by_the_model(), []
    thread = threading.Thread(target=lambda: found.append(asks(sys._getframe())))
    thread.start(), thread.join()
    assert found == [False]


def test_pythons_own_library_is_called_by_the_model_or_by_pytorch():
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(is_called_by_a_model(sys._getframe(1)))

    logger = logging.Logger("of a model")
    logger.addHandler(Handler())
    logger.error("called by a model")
    assert found == [True]
    assert not is_called_by_a_model(None)


def test_an_attribute_asks_for_a_class_and_a_call_does_not():
    class Asked:
        @property
        def __class__(self):
            found.append(asks_for_a_class(sys._getframe(1)))
            return Asked

    found = []
    asked = Asked()
    asked.__class__  # noqa: B018
    asked.__class__()
    isinstance(asked, int)
    assert found == [True, True, False]
