import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.runtime.microbatch import gather, scatter


@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from([0, 1, -1]))
def test_parts_are_nearly_equal_and_put_together_again(size, chunks, dim):
    x = torch.randn(size, size)
    parts = scatter(x, dim, min(chunks, size))
    sizes = [part.shape[dim] for part in parts]
    assert sizes == [part.shape[dim] for part in torch.tensor_split(x, len(parts), dim)]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(gather(parts, dim), x)


def test_what_is_shared_is_given_to_all():
    x = torch.ones(3)
    assert scatter(x, None, 2) == (x, x)


def test_parts_may_be_written_to_and_the_caller_sees_it():
    x = torch.zeros(4, requires_grad=True)
    y = x * 1
    for part in scatter(y, 0, 2):
        part.add_(1)
    assert torch.equal(y, torch.ones(4))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4))


def test_one_part_is_the_whole_and_nothing_is_copied():
    x = torch.ones(3)
    assert scatter(x, 0, 1)[0] is x
    assert gather([x], 0) is x


def test_a_mean_weighs_the_parts_by_their_sizes():
    x = torch.arange(5.0)
    parts = scatter(x, 0, 2)
    assert gather([part.mean() for part in parts], None, parts) == x.mean()


def test_leaves_of_a_value_have_dimensions_of_their_own():
    a, b = gather([(torch.ones(1, 2), torch.ones(2, 1))] * 3, (0, 1))
    assert (a.shape, b.shape) == ((3, 2), (2, 3))


def test_what_is_the_same_everywhere_is_given_once():
    flags = torch.tensor([True, False])
    assert gather([(7, flags), (7, flags.clone())], None)[0] == 7


@pytest.mark.parametrize("values", [(1, 2), (torch.tensor(1), torch.tensor(2))])
def test_what_differs_and_cannot_be_averaged_is_refused(values):
    with pytest.raises(ValueError, match=r"differs between micro-batches .*give its dimension"):
        gather(values, None)
