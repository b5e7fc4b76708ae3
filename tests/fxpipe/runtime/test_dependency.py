from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fxpipe.runtime.dependency import fork, join


def logged(tensor: Tensor, name: str, log: list[str]) -> Tensor:
    """The tensor, behind a node that writes its name when the backward passes."""
    out = tensor * 1
    out.register_hook(lambda grad: log.append(name))
    return out


def in_a_new_thread(work: Callable[[], Tensor]) -> Tensor:
    """Sequence numbers count per thread: what a new thread makes, the engine runs late."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def backward_order(tied: bool) -> list[str]:
    x = torch.ones(2, requires_grad=True)
    log: list[str] = []
    for _ in range(100):
        x * 1  # this thread's sequence numbers get ahead of a new thread's
    a = logged(x, "a", log)
    (a,), phony = fork((a,))

    def later_lane() -> Tensor:
        (b,) = join((x.clone(),), phony) if tied else (x.clone(),)
        return logged(b, "b", log)

    b = in_a_new_thread(later_lane)
    (a + b).sum().backward()
    return log


def test_the_engine_by_itself_prefers_the_thread_that_has_made_more_nodes():
    assert backward_order(tied=False) == ["a", "b"]


def test_what_is_behind_the_join_comes_before_what_is_ahead_of_the_fork():
    assert backward_order(tied=True) == ["b", "a"]


def test_values_and_gradients_are_untouched_and_non_tensors_pass():
    x = torch.randn(3, requires_grad=True)
    (y, n, none), phony = fork((x, 7, None))
    assert (n, none) == (7, None) and torch.equal(y, x) and phony.numel() == 0
    z = torch.randn(3, requires_grad=True)
    (w,) = join((z,), phony)
    (y * 2 + w * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(z.grad, torch.full((3,), 3.0))


def test_no_edge_without_gradient():
    plain = torch.ones(2)
    values, phony = fork((plain,))
    assert values[0] is plain and not phony.requires_grad
    (x, live), live_phony = fork((torch.ones(1, requires_grad=True), plain))
    assert live is plain and x.requires_grad and live_phony.requires_grad
    (still,) = join((plain,), live_phony)
    assert still is plain
    with torch.no_grad():
        values, phony = fork((torch.ones(1, requires_grad=True),))
        assert not phony.requires_grad


def test_a_tensor_that_gets_no_gradient_does_not_block_the_gate():
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (a, _), _ = fork((x, unused))
    a.sum().backward()
    assert torch.equal(x.grad, torch.ones(2)) and unused.grad is None
