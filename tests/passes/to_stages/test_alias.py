import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn

from fxpipe.ir.graph import (
    AGAIN,
    ALIAS,
    NO_BACKWARD,
    RANDOM,
    SAME_AS,
    VALUE,
    WRITES,
    WRITES_STATE,
)
from fxpipe.ir.printing import format_graph
from fxpipe.runtime.checkpointing.options import CheckpointOptions
from fxpipe.runtime.checkpointing.regions import Region, Settings
from passes import Alias


def noted(model, *inputs):
    """Of each node: the group that it has to stay with, and what it writes to."""
    gm = Alias(inputs)(fx.symbolic_trace(model))
    return gm, {n.name: (n.meta.get(ALIAS), n.meta.get(WRITES, ())) for n in gm.graph.nodes}


def test_every_node_has_the_value_that_it_would_have():
    class Model(nn.Module):
        def forward(self, x):
            return x.double().flatten(1), x.size(0)

    gm, _ = noted(Model(), torch.ones(2, 3, 4))
    values = {n.name: n.meta.get(VALUE) for n in gm.graph.nodes}
    assert (values["flatten"].dtype, values["flatten"].shape) == (torch.float64, (2, 12))
    assert values["size"] == 2


def test_a_write_that_nobody_else_sees_keeps_nothing_together():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            a = torch.sigmoid(x)
            return self.relu(a) * 2

    _, notes = noted(Model(), torch.ones(2))
    assert notes["relu"] == (None, ("sigmoid",))
    assert notes["sigmoid"] == (None, ())


def test_a_value_made_before_a_write_and_read_after_it_stays_with_the_writer():
    class Model(nn.Module):
        def forward(self, x):
            a = torch.sigmoid(x)
            v = a[:, 0]
            v.mul_(2)
            return torch.relu(a)

    _, notes = noted(Model(), torch.ones(2, 3))
    assert notes["mul_"] == (0, ("sigmoid", "getitem"))
    assert notes["sigmoid"][0] == notes["getitem"][0] == 0
    assert notes["relu"][0] is None, "it may be given the written value in a later stage"


def test_sets_that_share_a_node_are_one():
    class Model(nn.Module):
        def forward(self, x):
            a, b = torch.sigmoid(x), torch.tanh(x)
            v, w = a[:, 0], b[:, 0]
            v.add_(w)
            w.mul_(v)
            return a + b

    _, notes = noted(Model(), torch.ones(2, 3))
    together = ("sigmoid", "tanh", "getitem", "getitem_1", "add_", "mul_")
    assert {notes[name][0] for name in together} == {0}
    assert notes["add"][0] is None


def test_all_users_of_a_buffer_that_is_written_to_stay_together():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            a = x * self.count
            b = torch.relu(a)
            self.count.add_(1)
            return b

    gm = fx.GraphModule(Model(), buffer_graph())
    Alias((torch.ones(2),))(gm)
    groups = {n.name: n.meta.get(ALIAS) for n in gm.graph.nodes}
    assert groups["mul"] == groups["add_"] == 0
    assert groups["relu"] is None
    assert gm.count == 0, "nothing real is written to"


def buffer_graph():
    graph = fx.Graph()
    x, count = graph.placeholder("x"), graph.create_node("get_attr", "count")
    product = graph.call_function(torch.mul, (x, count))
    relu = graph.call_function(torch.relu, (product,))
    graph.call_method("add_", (count, 1))
    graph.output(relu)
    return graph


def test_who_draws_random_numbers_is_known():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.5), nn.Linear(3, 3)

        def forward(self, x):
            return self.drop(self.linear(x))

    model = Model()
    state = torch.get_rng_state()
    gm, _ = noted(model, torch.ones(2, 3))
    assert [n.name for n in gm.graph.nodes if n.meta.get(RANDOM)] == ["drop"]
    assert torch.equal(torch.get_rng_state(), state)
    gm, _ = noted(model.eval(), torch.ones(2, 3))
    assert not any(n.meta.get(RANDOM) for n in gm.graph.nodes)


def test_an_attention_that_drops_nothing_draws_nothing():
    class Model(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=self.p)

    x = torch.ones(2, 4, 8)

    def drawing(p):
        gm = Alias((x,))(fx.symbolic_trace(Model(p)))
        return [n.name for n in gm.graph.nodes if n.meta.get(RANDOM)]

    before = torch.get_rng_state()
    Model(0.0)(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawing(0.0) == []
    assert drawing(0.5) == ["scaled_dot_product_attention"]


def test_a_tensor_that_is_given_back_goes_by_its_last_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            a = torch.sigmoid(x)
            torch.relu_(a)
            b = torch.tanh(a)
            return a, self.same(b), b

    gm, notes = noted(Model(), torch.ones(2))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
sigmoid = sigmoid(x)
relu_ = relu_(sigmoid)
tanh = tanh(relu_)
same = same(tanh)
return (relu_, same, same)
""",
    )
    assert notes["relu_"] == (None, ("sigmoid",)), "a cut ahead of it is free"


def test_who_gives_a_tensor_on_as_it_came_is_known():
    class Model(nn.Module):
        def forward(self, x):
            a = torch.sigmoid(x)
            b = a.contiguous()
            return b.add_(1), b.view(-1)

    gm, _ = noted(Model(), torch.ones(2, 3))
    same = {n.name: n.meta[SAME_AS] for n in gm.graph.nodes if SAME_AS in n.meta}
    assert same == {"contiguous": ("sigmoid",)}, "a written one is another, and so is a view"


def test_what_no_output_leads_back_to_is_known():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            a = self.a(x)
            mask = self.b(x)  # has a gradient, but is only compared
            return torch.relu(a) * (mask > 0)

    gm, _ = noted(Model(), torch.ones(2, 3))
    assert [n.name for n in gm.graph.nodes if n.meta.get(NO_BACKWARD)] == ["b"]


def test_who_reads_a_buffer_by_the_name_of_what_wrote_to_it_stays_with_the_writer():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            return torch.tanh(x) + self.seen.add_(1)

    class Tracer(fx.Tracer):
        proxy_buffer_attributes = True

    model = Counter()
    gm = Alias((torch.ones(2, 3),))(fx.GraphModule(model, Tracer().trace(model)))
    assert {n.name for n in gm.graph.nodes if ALIAS in n.meta} == {"add_", "add"}


def test_a_view_that_a_write_to_its_memory_has_left_without_history():
    class Rotary(nn.Module):
        def forward(self, x):
            q = x * 1
            u, v = q[:, 2:].unflatten(-1, (2, -1)).unbind(-2)
            q[:, 2:].copy_(torch.cat([-v, u], -1))
            return q

    _, notes = noted(Rotary(), torch.ones(4, 8, requires_grad=True))
    _, written = notes["copy_"]
    assert {"mul", "unbind"} <= set(written), "u and v see the memory that is written to"
    assert len({notes[n][0] for n in ("mul", "unbind", "copy_")}) == 1


def test_a_function_may_write_to_a_list_that_it_is_given():
    gm, notes = noted(Ended(), torch.ones(4, 8))
    assert notes["ended"] == (None, ())
    assert gm(torch.ones(4, 8)).tolist() == Ended()(torch.ones(4, 8)).tolist()


@fx.wrap
def ended(parts, names):
    parts.append(parts[0] * 2)
    names["last"] = parts[-1]
    return torch.cat(parts) + names["last"].sum()


class Ended(nn.Module):
    def forward(self, x):
        return ended([x, x + 1], {"first": x})


def test_buffers_that_a_checkpoint_of_the_model_writes_to_again_are_noted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval())
            settings = Settings(CheckpointOptions(writes_again=True))
            self.part = Region(fx.symbolic_trace(part), settings, (0,))

        def forward(self, x):
            return self.part(x)

    model, tracer = Model(), fx.Tracer()
    tracer.is_leaf_module = lambda module, path: isinstance(module, Region)
    gm = Alias((torch.ones(2, 4),))(fx.GraphModule(model, tracer.trace(model)))
    noted = {n.name: n.meta[AGAIN] for n in gm.graph.nodes if AGAIN in n.meta}
    assert noted == {"part": ("1.running_mean", "1.running_var", "1.num_batches_tracked")}


class State(nn.Module):
    """Writes to its buffers in one way, and reads one of them in the end."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x):
        self.write(self, x.detach())
        return torch.relu(x.cos()) - self.mean


def traced_with_state(model):
    class Tracer(fx.Tracer):
        proxy_buffer_attributes = True

    return Alias((torch.ones(2, 3),))(fx.GraphModule(model, Tracer().trace(model)))


WAYS = {
    "in place": lambda s, x: s.mean.mul_(x.mean(0)),
    "data": lambda s, x: s.mean.data.mul_(x.mean(0)),
    "item": lambda s, x: s.mean.__setitem__(0, 1.0),
    "list": lambda s, x: torch._foreach_mul_([s.variance, s.mean], 0.5),
    "batch norm": lambda s, x: F.batch_norm(x, s.mean, s.variance, training=True),
    "instance norm": lambda s, x: F.instance_norm(torch.stack([x, x], -1), s.mean, s.variance),
    "update of statistics": lambda s, x: torch.batch_norm_update_stats(x, s.mean, s.variance, 0.1),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_reads_a_buffer_stays_with_who_writes_to_it_in_whatever_way(way):
    gm = traced_with_state(State(WAYS[way]))
    (writer,) = (node for node in gm.graph.nodes if "mean" in node.meta.get(WRITES_STATE, ()))
    reader = next(node for node in gm.graph.nodes if node.name == "sub")
    assert writer.meta[ALIAS] == reader.meta[ALIAS]
    assert next(n for n in gm.graph.nodes if n.name == "relu").meta.get(ALIAS) is None
    assert torch.equal(gm.mean, torch.zeros(3)), "nothing real is written to"


def test_who_reads_a_buffer_of_a_module_stays_with_the_module_if_that_writes_to_it():
    class Model(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return torch.relu(self.norm(x)) - self.norm.running_mean

    gm = traced_with_state(Model(nn.BatchNorm1d(3)))
    assert [n.name for n in gm.graph.nodes if ALIAS in n.meta] == ["norm", "sub"]
    gm = traced_with_state(Model(nn.BatchNorm1d(3).eval()))
    assert not any(ALIAS in n.meta for n in gm.graph.nodes), "one that only reads goes anywhere"


def test_parameters_that_a_module_writes_to_are_noted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 3, max_norm=0.1)

        def forward(self, x):
            return self.embed(x) + self.embed(x + 1)

    gm = Alias((torch.zeros(2, dtype=torch.long),))(fx.symbolic_trace(Model()))
    noted = {
        n.name: (n.meta[WRITES_STATE], n.meta[ALIAS]) for n in gm.graph.nodes if ALIAS in n.meta
    }
    assert noted == {"embed": (("embed.weight",), 0), "embed_1": (("embed.weight",), 0)}
