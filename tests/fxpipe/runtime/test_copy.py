import torch

from fxpipe.runtime.copy import copy, wait

CPU, META = "cpu/copy", "meta/copy"


def test_values_of_any_nesting_are_moved_and_what_is_no_tensor_passes():
    x, n = torch.ones(2, requires_grad=True), torch.arange(3)
    (moved, [index, word]) = copy((x, [n, "word"]), CPU, META)
    assert moved.device.type == index.device.type == "meta"
    assert moved.requires_grad and not index.requires_grad
    assert word == "word"


def test_a_gradient_comes_back_in_the_dtype_and_on_the_device_that_was_sent():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (near,) = copy((x,), CPU, CPU)
    near.float().sum().backward()
    assert (x.grad.dtype, x.grad.device.type) == (torch.bfloat16, "cpu")

    (far,) = copy((x,), CPU, META)
    (back,) = torch.autograd.grad(far.sum(), far)
    assert back.device.type == "meta", "and from there it cannot come back: it has no values"


def test_on_one_device_memory_is_shared():
    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True)
    near, same, _ = copy((x, y, z), CPU, CPU)
    assert near.data_ptr() == x.data_ptr() and near is not x
    assert same is y


def test_on_the_cpu_one_value_needs_neither_a_copy_nor_a_wait():
    x, y = torch.ones(2, requires_grad=True) * 2, torch.ones(2)
    for gate in (lambda v: copy(v, CPU, CPU), lambda v: wait(v, "cpu/compute", CPU)):
        near, same = gate((x, y))
        assert near is x and same is y


def test_a_copy_is_one_node_of_the_autograd_graph_for_all_its_values():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    for gate in (lambda v: copy(v, CPU, CPU), lambda v: wait(v, "cpu/compute", CPU)):
        a, b = gate((x, y))
        assert a.grad_fn is b.grad_fn
        order = []
        a.register_hook(lambda grad, order=order: order.append("a"))
        (a * 2 + b * 3).sum().backward()
        assert order == ["a"]
    assert torch.equal(x.grad, torch.full((2,), 4.0))
    assert torch.equal(y.grad, torch.full((2,), 6.0))


def test_a_value_whose_gradient_nobody_wants_gets_none():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    a, _ = wait(copy((x, y), CPU, CPU), "cpu/compute", CPU)
    a.sum().backward()
    assert y.grad is None and torch.equal(x.grad, torch.ones(2))


def test_without_gradients_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        (a,) = wait(copy((x,), CPU, CPU), "cpu/compute", CPU)
    assert a is x
