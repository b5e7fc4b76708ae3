import random as host
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fxpipe.runtime import random
from fxpipe.runtime.random import LOCK, Method, RandomState, Seeded, seeded, seeds


def test_the_default_generator_decides_and_goes_on():
    torch.manual_seed(1)
    a, b = seeds(3), seeds(3)
    torch.manual_seed(1)
    assert seeds(3) == a and a != b and len(set(a)) == 3


def test_a_seeded_function_draws_from_its_seed_and_index_only():
    x = torch.ones(100)
    drop, other = (Seeded(nn.Dropout(0.5), index) for index in range(2))
    state = torch.get_rng_state()
    a = drop(7, x)
    assert torch.equal(torch.get_rng_state(), state), "the default generator is as it was"
    torch.rand(5)
    assert torch.equal(drop(7, x), a)
    assert not torch.equal(drop(8, x), a)
    assert not torch.equal(other(7, x), a)


def test_without_a_seed_it_is_the_function():
    x, drop = torch.ones(100), nn.Dropout(0.5)
    torch.manual_seed(2)
    expected = drop(x)
    torch.manual_seed(2)
    assert torch.equal(Seeded(drop, 0)(None, x), expected)


def test_methods_and_functions_with_keywords():
    x = torch.empty(50)
    assert torch.equal(
        Seeded(Method("bernoulli_"), 0)(3, x.clone(), p=0.5),
        Seeded(torch.Tensor.bernoulli_, 0)(3, x.clone(), 0.5),
    )


def test_threads_do_not_disturb_each_other():
    x, drop = torch.ones(1000), Seeded(nn.Dropout(0.5), 0)
    expected = [drop(seed, x) for seed in range(4)]
    found = {}

    def work(seed):
        found[seed] = [drop(seed, x) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, masks in found.items():
        assert all(torch.equal(mask, expected[seed]) for mask in masks)
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def test_a_state_knows_whether_numbers_have_been_drawn_and_comes_back():
    state = RandomState({torch.device("cpu"), torch.device("meta")})
    assert not state.has_changed
    first = torch.rand(3)
    assert state.has_changed
    later = RandomState(())
    with state.restored():
        assert not state.has_changed and torch.equal(torch.rand(3), first)
    assert not later.has_changed
    state.put_back()
    assert torch.equal(torch.rand(3), first)


def test_who_asks_for_the_state_does_not_get_one_that_another_thread_has_borrowed():
    inside, asked = threading.Event(), threading.Event()
    found = []

    def ask():
        inside.wait()
        asked.set()
        found.append(RandomState(()))

    before, thread = RandomState(()), threading.Thread(target=ask)
    thread.start()
    with seeded(5, ()):
        inside.set()
        asked.wait()
        thread.join(0.05)
        assert not found, "it waits"
    thread.join()
    with found[0].restored():
        drawn = torch.rand(3)
    with before.restored():
        assert torch.equal(drawn, torch.rand(3))


needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator"
)


@needs_accelerator
def test_the_state_of_a_device_is_its_own():
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    state = RandomState({device})
    first = torch.rand(3, device=device)
    assert state.has_changed and not RandomState({device}).has_changed
    with state.restored():
        assert torch.equal(torch.rand(3, device=device), first)
    assert state.has_changed


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_a_seed_is_for_the_device_that_is_named_and_not_for_the_current_one():
    device = torch.device(torch.accelerator.current_accelerator().type, 1)
    states = [RandomState({torch.device(device.type, i)}) for i in (0, 1)]
    with seeded(5, {device}):
        assert states[1].has_changed
        first = torch.rand(3, device=device)
    with seeded(5, {device}):
        assert torch.equal(torch.rand(3, device=device), first)
    assert not any(state.has_changed for state in states)


def test_a_dropout_leaves_the_other_devices_generators_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(random, "seeded", lambda seed, devices: asked.append(devices))

    Seeded(nn.Dropout(0.5), 0)(3, torch.ones(4))
    Seeded(torch.nn.functional.dropout, 0)(3, torch.ones(4), p=0.5)

    assert not asked


def test_a_dropout_whose_hook_may_draw_elsewhere_has_all_generators_seeded():
    drawn = []
    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda *_: drawn.append(torch.rand(3)))

    for _ in range(2):
        Seeded(dropout, 0)(3, torch.ones(4))

    assert torch.equal(*drawn)


def test_a_module_that_is_given_a_list_has_its_tensors_devices_seeded():
    class OfAList(nn.Module):
        def forward(self, tensors):
            return torch.nn.functional.dropout(tensors[0])

    first, second = (Seeded(OfAList(), 0)(3, [torch.ones(50)]) for _ in range(2))

    assert torch.equal(first, second)


def drawn_on_the_host(x):
    return x + host.random() + np.random.rand()


def test_python_and_numpy_draw_from_the_seed_too_where_a_function_draws_with_them():
    x, draws = torch.zeros(()), Seeded(drawn_on_the_host, 0, on_the_host=True)
    states = host.getstate(), np.random.get_state()[1].tolist()
    found = draws(7, x)
    assert (host.getstate(), np.random.get_state()[1].tolist()) == states, "they are as they were"
    host.random(), np.random.rand()
    assert torch.equal(draws(7, x), found)
    assert torch.equal(draws.of(drawn_on_the_host)(7, x), found)
    assert not torch.equal(draws(8, x), found)


def test_python_and_numpy_draw_the_same_whatever_other_threads_draw():
    x, draws = torch.zeros(()), Seeded(drawn_on_the_host, 0, on_the_host=True)
    expected, found = [draws(seed, x) for seed in range(3)], {}

    def work(seed):
        found[seed] = [draws(seed, x) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected[seed]) for seed, drawn in found.items() for each in drawn)
