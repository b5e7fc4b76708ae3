from fxpipe.ir.cost import Cost


def test_costs_add_up_field_by_field():
    assert Cost(1.0, 2.0, 3, 4, 5, 6) + Cost(flops=1) == Cost(1.0, 2.0, 3, 4, 5, 7)


def test_every_micro_batch_but_the_first_adds_its_gradients_to_those_that_are_there():
    one = Cost(forward_s=1.0, backward_s=2.0, param_bytes=3, flops=4, accumulation_s=0.5)
    assert one.times(1) == one
    assert one.times(4) == Cost(
        forward_s=4.0, backward_s=8.0 + 3 * 0.5, param_bytes=3, flops=16, accumulation_s=0.5
    )
