import torch
from torch import fx, nn

from fxpipe.ir.graph import mutable, stage_nodes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.fc(x) * self.w


def test_work_is_everything_but_inputs_attributes_and_output():
    assert [n.name for n in stage_nodes(fx.symbolic_trace(Net()).graph)] == ["fc", "mul"]


def test_values_among_arguments_keep_their_types():
    found, shape = torch.ones(2, 3).max(1), torch.ones(2, 3).shape
    named = mutable((found, {"shape": shape}, fx.immutable_collections.immutable_list([1])))
    assert type(named[0]) is type(found) and type(named[1]["shape"]) is torch.Size
    assert type(named[2]) is list
