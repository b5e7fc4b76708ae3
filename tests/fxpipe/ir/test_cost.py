from fxpipe.ir.cost import Cost


def test_costs_add_up_field_by_field():
    assert Cost(1.0, 2.0, 3, 4, 5, 6) + Cost(flops=1) == Cost(1.0, 2.0, 3, 4, 5, 7)
