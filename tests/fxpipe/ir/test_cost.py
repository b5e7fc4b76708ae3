import pytest

from fxpipe.ir.cost import Cost, total


def test_costs_add_up_field_by_field():
    assert Cost(1.0, 2.0, 3, 4, 5, 6) + Cost(flops=1) == Cost(1.0, 2.0, 3, 4, 5, 7)


def test_the_total_of_many_costs_is_what_adding_them_one_after_the_other_gives():
    costs = [Cost(0.1 * i, 0.3 * i, i, flops=2 * i) for i in range(100)]
    one_by_one = Cost()
    for cost in costs:
        one_by_one = one_by_one + cost
    found = total(costs)
    assert found.forward_s == pytest.approx(one_by_one.forward_s, rel=1e-12)
    assert (found.param_bytes, found.flops) == (one_by_one.param_bytes, one_by_one.flops)
    assert isinstance(found.param_bytes, int)
    assert total([]) == Cost()


def test_every_micro_batch_but_the_first_adds_its_gradients_to_those_that_are_there():
    one = Cost(forward_s=1.0, backward_s=2.0, param_bytes=3, flops=4, accumulation_s=0.5)
    assert one.times(1) == one
    assert one.times(4) == Cost(
        forward_s=4.0, backward_s=8.0 + 3 * 0.5, param_bytes=3, flops=16, accumulation_s=0.5
    )
