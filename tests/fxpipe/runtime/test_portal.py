import weakref

import pytest
import torch

from fxpipe.runtime.portal import Portal, PortalError, portal_blue, portal_orange


def test_the_tensor_and_its_gradient_travel_through():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    portal, phony = portal_blue(y)
    assert phony.numel() == 0 and phony.requires_grad
    out = portal_orange(portal, phony)
    assert torch.equal(out, y)
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0]))


def test_two_consumers_sum_their_gradients():
    x = torch.ones(2, requires_grad=True)
    portal, phony = portal_blue(x, life=2)
    a, b = portal_orange(portal, phony), portal_orange(portal, phony)
    (a * 2 + b * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 5.0))


def test_none_travels():
    portal, phony = portal_blue(None)
    assert portal_orange(portal, phony) is None


def test_no_gradient_no_edge():
    portal, phony = portal_blue(torch.ones(2))
    assert not phony.requires_grad
    assert not portal_orange(portal, phony).requires_grad
    with torch.no_grad():
        portal, phony = portal_blue(torch.ones(2, requires_grad=True))
        assert not portal_orange(portal, phony).requires_grad


def test_a_consumer_that_yields_no_gradient_gives_the_source_none():
    x, z = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    portal, phony = portal_blue(x)
    out = portal_orange(portal, phony)
    (out.detach() * z).sum().backward()
    assert x.grad is None and torch.equal(z.grad, torch.ones(2))


def test_backward_twice_with_retain_graph():
    x = torch.ones(2, requires_grad=True)
    portal, phony = portal_blue(x)
    loss = (portal_orange(portal, phony) * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, torch.full((2,), 6.0))


def test_taking_once_too_often_is_refused():
    portal, phony = portal_blue(torch.ones(2))
    portal_orange(portal, phony)
    with pytest.raises(PortalError, match="as often as its life allowed"):
        portal_orange(portal, phony)


def test_a_life_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Portal(torch.ones(1), life=0)


def test_the_last_taker_frees_the_tensor():
    tensor = torch.ones(2)
    storage = weakref.ref(tensor.untyped_storage())
    portal = Portal(tensor, life=2)
    del tensor
    portal.take()
    assert portal._tensor is not None
    portal.take()
    assert portal._tensor is None
    assert storage() is None
