import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.runtime.shared import assigned_to_both, call, replica


def test_a_module_runs_on_the_values_given_and_stays_as_it_is():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    before = [p.clone() for p in model.parameters()]
    x, w = torch.randn(3, 2), torch.randn(2, 2, requires_grad=True)
    y = call(model, {"1.0.weight": w}, x)
    assert torch.equal(y, F.linear(model[0](x), w))
    y.sum().backward()
    assert w.grad is not None and model[1][0].weight.grad is None
    assert model[0].weight.grad is not None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias", "1.0.weight"]


def test_recurrent_modules_use_the_values_too():
    model, twin = nn.LSTM(2, 2), nn.LSTM(2, 2)
    x, values = torch.randn(3, 1, 2), dict(twin.named_parameters())
    assert torch.equal(call(model, values, x)[0], twin(x)[0])


def test_buffers_are_written_to_as_ever():
    model = nn.BatchNorm1d(2)
    call(model, {"weight": torch.ones(2)}, torch.randn(4, 2))
    assert model.num_batches_tracked == 1


def test_a_module_finds_the_values_among_its_parameters():
    """Some ask for their first parameter, to know of which dtype they are."""

    class Asks(nn.Linear):
        def forward(self, x):
            assert [name for name, _ in self.named_parameters()] == ["weight", "bias"]
            return super().forward(x.to(next(self.parameters()).dtype))

    model = Asks(2, 2)
    values = {"bias": torch.zeros(2), "weight": torch.eye(2)}
    y = call(nn.Sequential(model), {f"0.{name}": v for name, v in values.items()}, torch.ones(1, 2))
    torch.testing.assert_close(y, torch.ones(1, 2))


def test_what_is_assigned_to_a_replica_can_be_assigned_to_the_module_too():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].calls, model[0].last = 0, "a"
    own = dict(model.named_parameters())
    made, _ = replica(model, {"0.weight": torch.ones(2, 2)})
    with assigned_to_both(model, made):
        made[0].calls, made[0].new = 1, "b"
        del made[0].last
        assert model[0].calls == 0
    assert (model[0].calls, model[0].new) == (1, "b") and not hasattr(model[0], "last")
    assert all(p is own[name] for name, p in model.named_parameters())
