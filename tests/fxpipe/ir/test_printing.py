import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from fxpipe.ir.graph import MICROBATCH, STAGE, STREAM
from fxpipe.ir.printing import format_graph


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x, scale=2):
        y = self.fc(x) * self.w
        a, b = torch.split(y, 1, dim=1)
        return {"out": torch.cat((a, b), dim=1).relu()[:, 0:1], "s": scale}


def test_a_graph_is_printed_a_node_a_line():
    gm = fx.symbolic_trace(Net())
    for node in gm.graph.nodes:
        if node.name == "fc":
            node.meta.update({STAGE: 0, MICROBATCH: 1, STREAM: "cpu:0"})
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
scale: input = 2
fc = fc(x)  # stage 0, mb 1, cpu:0
w = self.w
mul = mul(fc, w)
split = split(mul, 1, dim=1)
getitem = split[0]
getitem_1 = split[1]
cat = cat((getitem, getitem_1), dim=1)
relu = .relu(cat)
getitem_2 = relu[(:, 0:1)]
return {'out': getitem_2, 's': scale}
""",
    )
    assert format_graph(gm.graph) == format_graph(gm)
