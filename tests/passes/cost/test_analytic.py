from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.ir.cost import cost_of
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.graph import COST, SAVED, stage_nodes
from passes import Alias, AnalyticCost, Rows
from passes.cost.work import Runs
from tests.zoo import MODELS, ResNet, Tied

WITH_TIED = {**MODELS, "tied": (Tied, lambda batch: (torch.randint(11, (batch, 5)),))}


def costed(model, *inputs, **options):
    return AnalyticCost(**options)(Alias(inputs)(fx.symbolic_trace(model)))


def costs(model, *inputs, **options):
    return {n.name: n.meta[COST] for n in stage_nodes(costed(model, *inputs, **options).graph)}


def test_a_linear_costs_what_its_sizes_say():
    device = DeviceSpec(flops_per_s=1e9, bytes_per_s=1e12, launch_s=0)
    model, x = nn.Sequential(nn.Linear(8, 16, bias=False)), torch.ones(4, 8, requires_grad=True)
    cost = costs(model, x, device=device, optimizer_states=1)["_0"]
    assert cost.flops == 2 * 4 * 8 * 16
    assert cost.backward_flops == 2 * cost.flops, "one product for the weight, one for the input"
    assert cost.param_bytes == cost.gradient_bytes == cost.optimizer_bytes == 8 * 16 * 4
    assert cost.output_bytes == 4 * 16 * 4
    assert cost.activation_bytes == 4 * 8 * 4, "the input, for the weight's gradient"
    assert cost.forward_s == pytest.approx(2 * 4 * 8 * 16 / 1e9)
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)


@pytest.mark.parametrize("kind, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_multiplies_its_inputs_and_its_states_at_each_step(kind, gates):
    steps, rows = 6, 5
    model = nn.Sequential(kind(8, 16, num_layers=2, bias=False))
    cost = costs(model, torch.ones(steps, rows, 8, requires_grad=True))["_0"]
    first, second = gates * 16 * (8 + 16), gates * 16 * (16 + 16)
    assert cost.flops == 2 * steps * rows * (first + second)
    assert cost.backward_flops == pytest.approx(2 * cost.flops, rel=0.1), "a first state has no use"


def test_no_gradient_is_computed_for_inputs_that_need_none():
    cost = costs(nn.Sequential(nn.Linear(8, 16, bias=False)), torch.ones(4, 8))["_0"]
    assert cost.backward_flops == cost.flops


def test_frozen_parameters_have_no_gradients_and_no_optimizer():
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    cost = costs(model, torch.ones(2, 4))["_0"]
    assert cost.param_bytes == 80
    assert (cost.gradient_bytes, cost.optimizer_bytes, cost.backward_s) == (0, 0, 0)


def test_half_precision_computes_at_its_own_rate():
    device = DeviceSpec(flops_per_s=1e9, half_flops_per_s=4e9, bytes_per_s=1e15, launch_s=0)
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(4, 8)
    whole = costs(model, x, device=device)["_0"]
    half = costs(model.bfloat16(), x.bfloat16(), device=device)["_0"]
    assert whole.forward_s == pytest.approx(4 * half.forward_s)


@pytest.fixture
def put_back():
    """Sets the precision of products as it was, after a test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision, faster", [("highest", 1), ("high", 8)])
def test_products_of_float32_compute_in_tf32_where_pytorch_is_set_to(precision, faster, put_back):
    torch.set_float32_matmul_precision(precision)
    device = DeviceSpec(flops_per_s=8e9, full_flops_per_s=1e9, bytes_per_s=1e15, launch_s=0)
    linear, x = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(4, 8)
    convolution, image = nn.Sequential(nn.Conv2d(1, 1, 3, bias=False)), torch.ones(1, 1, 6, 6)

    product = costs(linear, x, device=device)["_0"]
    convolved = costs(convolution, image, device=device)["_0"]

    assert product.forward_s == pytest.approx(product.flops / (faster * 1e9))
    assert convolved.forward_s == pytest.approx(convolved.flops / 8e9), "TF32 by default"


def of_microbatches(model, chunks, *inputs, **options):
    """The costs of nodes, for a mini-batch that is cut along dimension 0 into micro-batches."""
    gm = Rows(inputs, (0,) * len(inputs), chunks)(Alias(inputs)(fx.symbolic_trace(model)))
    gm = AnalyticCost(chunks=chunks, **options)(gm)
    return {n.name: n.meta[COST] for n in stage_nodes(gm.graph)}


BYTES_ONLY = DeviceSpec(flops_per_s=1e30, bytes_per_s=1.0, launch_s=0.0)
"""A device on which seconds are bytes."""


@pytest.mark.parametrize("rows", [12, 10, 5])
def test_each_micro_batch_reads_the_weights_and_makes_and_accumulates_their_gradients(rows):
    width, chunks = 8, 4
    model, x = nn.Sequential(nn.Linear(width, width, bias=False)), torch.ones(rows, width)
    cost = of_microbatches(model, chunks, x, device=BYTES_ONLY)["_0"]
    weight, values = width * width * 4, rows * width * 4
    assert cost.forward_s == 2 * values + chunks * weight
    assert cost.accumulation_s == 3 * weight, "both gradients are read, and the sum is written"
    made = 2 * values + chunks * weight
    assert cost.backward_s == made + (chunks - 1) * cost.accumulation_s
    assert cost.flops == 2 * rows * width * width, "products are in proportion to the rows"


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("kind", [nn.Linear, partial(nn.Conv1d, kernel_size=3), nn.GRU])
def test_a_node_costs_as_much_as_its_micro_batches_by_themselves(kind, chunks):
    rows, width = 12, 8
    model = nn.Sequential(kind(width, width))
    shape, dim = {nn.Linear: ((rows, width), 0), nn.GRU: ((5, rows, width), 1)}.get(
        kind, ((rows, width, 16), 0)
    )
    x = torch.ones(shape, requires_grad=True)
    gm = Rows((x,), (dim,), chunks)(Alias((x,))(fx.symbolic_trace(model)))
    (whole,) = (n.meta[COST] for n in stage_nodes(AnalyticCost(chunks=chunks)(gm).graph))
    part = costs(model, x.detach().narrow(dim, 0, rows // chunks).requires_grad_())["_0"]
    for name in ("forward_s", "backward_s", "flops", "backward_flops"):
        assert getattr(whole, name) == pytest.approx(getattr(part.times(chunks), name)), name


def test_a_gradient_of_a_table_is_as_large_as_the_table_unless_it_is_sparse():
    rows, size, width, chunks = 8, 1000, 16, 4
    ids = torch.zeros(rows, 1, dtype=torch.long)
    table = size * width * 4
    for kind in (nn.Embedding, nn.EmbeddingBag):
        dense, sparse = (
            of_microbatches(
                nn.Sequential(kind(size, width, sparse=is_sparse)), chunks, ids, device=BYTES_ONLY
            )["_0"]
            for is_sparse in (False, True)
        )
        assert dense.forward_s < table / 10, "it reads the rows that are looked up"
        assert dense.forward_s == sparse.forward_s
        assert 0 <= dense.backward_s - chunks * table - (chunks - 1) * 3 * table < table / 10
        assert sparse.backward_s < table / 10
        assert sparse.accumulation_s == 0


def test_weights_that_are_not_trained_have_no_gradients_to_accumulate():
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    cost = of_microbatches(model, 4, torch.ones(8, 8, requires_grad=True))["_0"]
    assert cost.accumulation_s == 0 < cost.backward_s


def test_what_moves_more_than_it_computes_is_bound_by_bandwidth():
    device = DeviceSpec(flops_per_s=1e15, bytes_per_s=1e6, launch_s=0)
    cost = costs(nn.Sequential(nn.ReLU()), torch.ones(1000), device=device)["_0"]
    assert cost.forward_s == pytest.approx(8000 / 1e6), "4000 bytes read, 4000 written"


def test_only_what_moves_bytes_is_an_operator():
    class Model(nn.Module):
        def forward(self, x):
            return x.view(-1).relu()

    device = DeviceSpec(flops_per_s=1e15, bytes_per_s=1e15, launch_s=1.0)
    found = costs(Model(), torch.ones(2, 3, requires_grad=True), device=device)
    seconds = {name: (cost.forward_s, cost.backward_s) for name, cost in found.items()}
    assert seconds["view"] == (0, 0)
    assert seconds["relu"] == pytest.approx((1, 1), abs=1e-6)


def test_buffers_are_counted():
    cost = costs(nn.Sequential(nn.BatchNorm1d(3)), torch.ones(2, 3))["_0"]
    assert cost.buffer_bytes == 3 * 4 + 3 * 4 + 8, "mean, variance, and the number of batches"


def test_without_a_gradient_nothing_is_kept_and_there_is_no_backward():
    cost = costs(nn.Sequential(nn.ReLU()), torch.ones(10))["_0"]
    assert (cost.backward_s, cost.activation_bytes) == (0, 0)


def test_a_shared_parameter_is_counted_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [c.param_bytes for c in costs(model, torch.ones(2, 4)).values()] == [64, 0]


@pytest.mark.parametrize("name", WITH_TIED)
def test_flops_are_those_of_the_flop_counter(name):
    make, inputs = WITH_TIED[name]
    model, x = make(), inputs(4)
    with FlopCounterMode(display=False) as forward:
        output = model(*x)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    found = costs(model, *x).values()
    assert sum(c.flops for c in found) == forward.get_total_flops()
    assert sum(c.backward_flops for c in found) == backward.get_total_flops()


def saved_bytes(model: nn.Module, x: tuple[Tensor, ...]) -> int:
    """What autograd keeps, each memory once, without parameters and buffers."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*x)
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WITH_TIED)
def test_activation_bytes_are_those_of_saved_tensor_hooks(name, training):
    make, inputs = WITH_TIED[name]
    model, x = make().train(training), inputs(4)
    assert sum(c.activation_bytes for c in costs(model, *x).values()) == saved_bytes(model, x)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_view_of_a_parameter_that_is_saved_is_no_activation(chunks):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 8))

        def forward(self, x):
            return x @ self.weight.t()

    x = torch.ones(4, 8, requires_grad=True)
    gm = Rows((x,), (0,), chunks)(Alias((x,))(fx.symbolic_trace(Turned())))
    gm = AnalyticCost(chunks=chunks)(gm)
    (cost,) = (n.meta[COST] for n in stage_nodes(gm.graph) if "matmul" in n.name)
    assert cost.activation_bytes == x.nbytes


class TurnedRows(nn.Module):
    """Saves the value of a tanh, and the same in another order, of which the square is taken."""

    def forward(self, x):
        return torch.tanh(x).transpose(0, 1).contiguous().square()


@pytest.mark.parametrize(("chunks", "kept"), [(1, 2), (2, 2), (4, 1)])
def test_a_micro_batch_of_one_row_keeps_a_view_where_others_keep_a_copy(chunks, kept):
    x = torch.ones(4, 6, requires_grad=True)
    gm = Rows((x,), (0,), chunks)(Alias((x,))(fx.symbolic_trace(TurnedRows())))
    gm = AnalyticCost(chunks=chunks)(gm)
    assert cost_of(stage_nodes(gm.graph)).activation_bytes == kept * x.nbytes


def test_memory_that_two_nodes_keep_has_one_number():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    saved = {
        n.name: dict(n.meta[SAVED])
        for n in costed(model, torch.ones(2, 3)).graph.nodes
        if SAVED in n.meta
    }
    assert saved["_1"] == saved["_2"] == {next(iter(saved["_1"])): 24}


def test_a_model_on_meta_costs_the_same():
    torch.manual_seed(0)
    real = costs(ResNet(), torch.randn(4, 3, 8, 8))
    meta = costs(ResNet().to("meta"), torch.randn(4, 3, 8, 8, device="meta"))
    assert real == meta


def test_a_batch_norm_that_reads_a_number_off_its_buffers_costs_what_one_does_that_does_not():
    x = torch.randn(4, 3)
    wanted = costs(nn.Sequential(nn.BatchNorm1d(3)), x)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    assert costs(model, x) == wanted
    assert costs(model.to("meta"), x.to("meta")) == wanted


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.norm() > 1 else grad


class RunAgain(nn.Module):
    """A module with a hook, which is a node, and of which PyTorch's checkpoint is made within."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(3, 3), use_reentrant
        self.register_forward_hook(lambda *_: None)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Applied(nn.Module):
    def forward(self, x):
        return Clipped.apply(x)


@pytest.mark.parametrize("node", [Applied, partial(RunAgain, True), partial(RunAgain, False)])
def test_a_backward_that_takes_values_counts_as_two_forwards(node):
    class Leaves(fx.Tracer):
        def is_leaf_module(self, module, name):
            return name == "1" or super().is_leaf_module(module, name)

    model, x = nn.Sequential(nn.Linear(3, 3), node()), torch.ones(2, 3)
    gm = Alias((x,))(fx.GraphModule(model, Leaves().trace(model)))
    found = {n.name: n.meta[COST] for n in stage_nodes(AnalyticCost()(gm).graph)}["_1"]
    assert found.backward_s == pytest.approx(2 * found.forward_s) and found.forward_s > 0
    assert found.backward_flops == 2 * found.flops


def test_equal_nodes_are_run_once(monkeypatch):
    ran = []
    run = Runs._run
    monkeypatch.setattr(
        Runs, "_run", lambda self, node: (ran.append(node.name), run(self, node))[1]
    )
    layers = [layer for _ in range(5) for layer in (nn.Linear(3, 3), nn.ReLU())]
    found = costs(nn.Sequential(*layers, nn.Linear(3, 3, bias=False)), torch.ones(2, 3))
    assert ran == ["_0", "_1", "_2", "_10"], "the first has an input that needs no gradient"
    assert found["_4"] == found["_2"]
    assert found["_10"] != found["_2"]


def test_the_default_device_is_a_core_of_a_cpu():
    x = torch.ones(4, 4)
    assert costs(nn.Sequential(nn.Linear(4, 4)), x) == costs(
        nn.Sequential(nn.Linear(4, 4)), x, device=CPU_CORE
    )


@pytest.mark.parametrize(
    "one, other, count",
    [
        ((8, 16), (3, 16, 32), 8 * 16 * 32),  # each row for one of three matrices
        ((3, 4, 16), (16, 8), 4 * 16 * 8),  # each column
        ((4, 8), (8, 16), 4 * 8 * 16),  # the columns of one, and the rows of the other
        ((3, 4, 16), (3, 16, 8), 3 * 4 * 16 * 8),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_by_groups_count_what_all_groups_compute(device, one, other, count):
    class Products(nn.Module):
        def forward(self, one, other, ends):
            return F.grouped_mm(one, other, offs=ends)

    has_ends = len(one) == 2 or len(other) == 2
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    ends = torch.tensor([2, 5, 8], dtype=torch.int32, device=device) if has_ends else None
    tensors = torch.zeros(one, **options), torch.zeros(other, **options)
    (cost,) = costs(Products(), *tensors, ends).values()
    assert cost.flops == 2 * count
    assert cost.backward_flops == 2 * cost.flops


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_counts_its_products_and_keeps_no_weights(device, heads):
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads < 8)

    q, k, v = (
        torch.zeros(2, n, 64, 32, device=device, requires_grad=True) for n in (8, heads, heads)
    )
    cost = costs(Attention(), q, k, v, device=CPU_CORE)["scaled_dot_product_attention"]
    product = 2 * 2 * 8 * 64 * 64 * 32
    assert cost.flops == 2 * product, "queries with keys, and weights with values"
    assert cost.backward_flops == 5 * product, "the weights again, and two for each of the products"
    logsumexp = 2 * 8 * 64 * 4
    assert cost.activation_bytes == 2 * q.nbytes + k.nbytes + v.nbytes + logsumexp
