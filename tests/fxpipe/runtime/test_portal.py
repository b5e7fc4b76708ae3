import weakref

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.runtime.dependency import fork
from fxpipe.runtime.portal import Hidden, PortalError, portal_blue, portal_copy, portal_orange


def test_the_tensor_and_its_gradient_travel_through():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    portal = portal_blue(y)
    assert portal.phony.numel() == 0 and portal.phony.requires_grad
    out = portal_orange(portal)
    assert torch.equal(out, y)
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0]))


def test_two_consumers_sum_their_gradients():
    x = torch.ones(2, requires_grad=True)
    portal = portal_blue(x, life=2)
    a, b = portal_orange(portal), portal_orange(portal)
    (a * 2 + b * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 5.0))


def test_none_travels():
    portal = portal_blue(None)
    assert portal_orange(portal) is None


def test_no_gradient_no_edge():
    portal = portal_blue(torch.ones(2))
    assert not portal.phony.requires_grad
    assert not portal_orange(portal).requires_grad
    with torch.no_grad():
        portal = portal_blue(torch.ones(2, requires_grad=True))
        assert not portal_orange(portal).requires_grad


def test_a_consumer_that_yields_no_gradient_gives_the_source_none():
    x, z = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    portal = portal_blue(x)
    out = portal_orange(portal)
    (out.detach() * z).sum().backward()
    assert x.grad is None and torch.equal(z.grad, torch.ones(2))


def test_backward_twice_with_retain_graph():
    x = torch.ones(2, requires_grad=True)
    portal = portal_blue(x)
    loss = (portal_orange(portal) * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, torch.full((2,), 6.0))


def test_taking_once_too_often_is_refused():
    portal = portal_blue(torch.ones(2))
    portal_orange(portal)
    with pytest.raises(PortalError, match="as often as its life allowed"):
        portal_orange(portal)


def test_a_life_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Hidden(torch.ones(1), life=0)


def test_the_last_taker_frees_the_tensor():
    tensor = torch.ones(2)
    storage = weakref.ref(tensor.untyped_storage())
    hidden = Hidden(tensor, life=2)
    del tensor
    hidden.take()
    assert hidden._tensor is not None
    hidden.take()
    assert hidden._tensor is None
    assert storage() is None


def test_a_copy_moves_tensor_and_gradient_and_frees_the_source_cell():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    storage = weakref.ref(y.untyped_storage())
    near = portal_blue(y)
    far = portal_copy(near, "cpu/copy", "cpu/copy")
    with pytest.raises(PortalError):
        near.hidden.take()
    out = portal_orange(far)
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0]))
    del y, out, near, far
    assert storage() is None


def test_a_copy_changes_the_device():
    portal = portal_copy(portal_blue(torch.ones(2)), "cpu/copy", "meta/copy")
    assert portal_orange(portal).device.type == "meta"


def test_none_and_what_has_no_gradient_are_copied():
    assert portal_orange(portal_copy(portal_blue(None), "cpu/copy", "cpu/copy")) is None
    plain = portal_orange(portal_copy(portal_blue(torch.ones(2)), "cpu/copy", "cpu/copy"))
    assert torch.equal(plain, torch.ones(2)) and not plain.requires_grad


def test_gates_order_a_portal_by_its_phony():
    x = torch.ones(2, requires_grad=True)
    (portal, n), phony = fork((portal_blue(x), 7))
    assert n == 7 and phony.requires_grad and portal.phony.requires_grad
    (portal_orange(portal) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_a_backward_that_failed_leaves_nothing_for_the_next():
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    failing = [True]

    def fail(grad):
        if failing.pop():
            raise ValueError

    portal = portal_blue(y)
    (portal, other), _ = fork((portal, x * 1))
    other.register_hook(fail)
    failing.insert(0, False)
    loss = (portal_orange(portal) * 3).sum() + other.sum()
    with pytest.raises(ValueError):
        loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, torch.full((2,), 4.0))


def test_the_source_devices_memory_is_free_as_soon_as_it_is_copied():
    x = torch.randn(3, requires_grad=True)
    y = x + 1  # which saves nothing
    storage = weakref.ref(y.untyped_storage())
    portal = portal_blue(y)
    del y
    assert storage() is not None
    far = portal_copy(portal, "cpu/copy", "meta/copy")
    assert storage() is None, "though the portal is still there, and its backward to come"
    assert portal_orange(far).device.type == "meta"


made: dict[str, weakref.ref[object]] = {}
alive: dict[str, list[str]] = {}


@fx.wrap
def watched(x: torch.Tensor, name: str) -> torch.Tensor:
    """Notes which of the values made before are alive."""
    alive[name] = [other for other, storage in made.items() if storage() is not None]
    y = x + 1
    made[name] = weakref.ref(y.untyped_storage())
    return y


class Skip(nn.Module):
    def forward(self, x):
        a = watched(x, "a")
        b = watched(a, "b")
        c = watched(b, "c")
        return watched(c + a, "d"), watched(c, "e")


@pytest.mark.parametrize("gradients", [False, True])
def test_a_skip_is_gone_with_its_last_use(gradients):
    x = torch.randn(2, 3, requires_grad=gradients)
    with fxpipe.compile(
        Skip(), ["cpu"] * 5, chunks=1, partition=[f"watched_{i}" for i in range(1, 5)]
    ) as pipe:
        pipe.prepare(x)
        made.clear()
        output = pipe(x)
        assert pipe.skip_layout.skips, "a is a skip"
    assert alive["b"] == ["a"] and "a" in alive["c"]
    assert "a" not in alive["e"]
    assert output[0].shape == (2, 3)
