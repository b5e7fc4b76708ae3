"""Both front ends give graphs that do what the model does, and leave the model alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.trace import Traced, TraceError, canonical, input_key, trace
from fxpipe.whole import Whole

BOTH = pytest.mark.parametrize("tracer", ["symbolic", "export"])


def x(batch: int = 4, width: int = 8) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(batch))


def run(traced: Traced, *args: Any, **kwargs: Any) -> Any:
    return traced.rebuild(traced.graph_module(*traced.bind(args, kwargs)))


def same(a: Any, b: Any) -> bool:
    (xs, spec), (ys, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other and all(
        torch.equal(p, q) if isinstance(p, Tensor) else p == q for p, q in zip(xs, ys, strict=True)
    )


def placeholders(traced: Traced) -> list[str]:
    return [node.name for node in traced.graph_module.graph.nodes if node.op == "placeholder"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 1


class Options(nn.Module):
    """Every kind of argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, flag: bool = True, *, scale: float = 2.0
    ) -> dict[str, Any]:
        h = self.linear(x) if flag else x
        if mask is not None:
            h = h * mask
        return {"h": h * scale, "parts": [h, (h + 1, None)], "flag": flag}


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], *rest: Tensor) -> Tensor:
        a, b = batch["ids"]
        if batch["mask"] is None:
            return a + b * len(rest)
        return a + b * batch["mask"] + sum(rest)


class Branch(nn.Module):
    """Not for fx: control flow on a size. Export takes it, for the sizes do not vary."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 2 else x


class BranchOnBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 2 else x


class Noisy(nn.Module):
    """All that a careless tracer disturbs: buffers, random states, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.constant = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x)) + self.constant + torch.tensor(2.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.shift


def test_symbolic_graph_is_the_model_bitwise_at_every_batch_size() -> None:
    model = MLP()
    traced = trace(model, (x(),))
    assert traced.front_end == "symbolic"
    assert placeholders(traced) == ["x"]
    for batch in 1, 3, 16:
        assert torch.equal(run(traced, x(batch)), model(x(batch)))


@BOTH
def test_nested_inputs_become_a_placeholder_for_each_tensor(tracer: str) -> None:
    batch = {"ids": [x(), x(4)], "mask": x(4)}
    traced = trace(Nested(), (batch, x(4), x(4)), tracer=tracer)
    assert placeholders(traced) == ["batch_ids_0", "batch_ids_1", "batch_mask", "rest_0", "rest_1"]
    assert same(run(traced, batch, x(4), x(4)), Nested()(batch, x(4), x(4)))


@BOTH
def test_arguments_may_be_called_what_python_or_the_graph_calls_something_else(tracer: str) -> None:
    class Named(MLP):
        def forward(self, self_: Tensor, lambda_: Tensor, torch: Tensor) -> Tensor:
            return super().forward(self_ + lambda_).relu() + torch[:, :1]

    model = Named()
    traced = trace(model, (x(), x(), x()), tracer=tracer)
    assert placeholders(traced) == ["self_", "lambda_", "torch_"]
    assert same(run(traced, x(), x(), x()), model(x(), x(), x()))


@BOTH
def test_none_within_a_structure_is_part_of_the_trace(tracer: str) -> None:
    batch = {"ids": [x(), x(4)], "mask": None}
    traced = trace(Nested(), (batch,), tracer=tracer)
    assert placeholders(traced) == ["batch_ids_0", "batch_ids_1"]
    assert same(run(traced, batch), Nested()(batch))


@BOTH
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"mask": None}, {"mask": x()}, {"flag": False}, {"scale": 3.0, "mask": x(), "flag": True}],
    ids=str,
)
def test_arguments_and_defaults_mean_what_they_mean_to_the_model(
    tracer: str, kwargs: dict[str, Any]
) -> None:
    model = Options()
    traced = trace(model, (x(),), kwargs, tracer=tracer)
    assert placeholders(traced) == ["x", "mask"][: 1 + (kwargs.get("mask") is not None)]
    assert same(run(traced, x=x(), **kwargs), model(x(), **kwargs))
    targets = {str(node.target) for node in traced.graph_module.graph.nodes}
    assert not any("assert" in target for target in targets)


def test_equal_keys_share_a_trace_and_others_do_not() -> None:
    model = Options()
    key = input_key(model, (x(),), {})
    assert key == input_key(model, (), {"x": x(9)})
    assert key != input_key(model, (x(),), {"mask": None})
    assert key != input_key(model, (x(),), {"mask": x()})
    assert input_key(model, (x(),), {"flag": True}) != input_key(model, (x(),), {"flag": 1})
    assert key != input_key(model, (x(4, 9),), {})
    assert input_key(model, (x(),), {}, shapes=False) == input_key(
        model, (x(4, 9),), {}, shapes=False
    )
    with torch.autocast("cpu"):
        assert key != input_key(model, (x(),), {})
    model.linear.eval()
    assert key != input_key(model, (x(),), {})


def test_canonical_puts_arguments_where_the_signature_does() -> None:
    args, kwargs = canonical(Options(), (), {"scale": 1.0, "mask": 2, "x": 3})
    assert (args, kwargs) == ((3, 2), {"scale": 1.0})
    with pytest.raises(TypeError, match=r"Options.forward\(\): missing .* 'x'"):
        canonical(Options(), (), {})


def test_inputs_of_another_structure_are_refused() -> None:
    traced = trace(Options(), (x(),))
    with pytest.raises(TypeError, match="traced with"):
        traced.bind((x(),), {"mask": x()})


def test_control_flow_on_a_fixed_size_goes_to_export() -> None:
    traced = trace(Branch(), (x(),))
    assert traced.front_end == "export"
    for batch in 1, 2, 7:
        assert torch.equal(run(traced, x(batch)), x(batch) * 2)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_control_flow_on_the_batch_size_is_refused(batch: int) -> None:
    with pytest.raises(TraceError) as error:
        trace(BranchOnBatch(), (x(batch),))
    text = str(error.value)
    assert "symbolic: TraceError: symbolically traced" in text
    assert "test_trace.py" in text and "if x.shape[0] > 2" in text
    assert "export: it branches on its batch size" in text or "export: its graph differs" in text
    assert "tracer=" in text


def test_a_batch_size_that_is_baked_in_is_refused_with_both_reasons() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[i] * i for i in range(x.shape[0])])

    with pytest.raises(
        TraceError, match=r"(?s)symbolic: .*range\(x.shape\[0\]\).*export: its graph"
    ):
        trace(Loop(), (x(),))


def test_a_size_that_the_model_itself_fixes_is_kept() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, 8)

    assert torch.equal(run(trace(View(), (x(),)), x()), x())


def test_an_example_batch_of_one_serves_for_all() -> None:
    traced = trace(MLP(), (x(1),), tracer="export")
    assert run(traced, x(5)).shape == (5, 8)


def test_batch_dims_say_which_dimension_is_the_batch() -> None:
    class Across(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 2 else table @ x

    args = torch.randn(8, 4), torch.randn(8, 8)
    traced = trace(Across(), args, tracer="export", batch_dims=[1, None])
    assert run(traced, torch.randn(8, 6), args[1]).shape == (8, 6)
    with pytest.raises(ValueError, match="1 entries, but the inputs hold 2"):
        trace(Across(), args, batch_dims=[1])


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_batch_norm_behave_as_in_the_model(tracer: str, training: bool) -> None:
    model = Noisy().train(training)
    traced = trace(model, (x(),), tracer=tracer)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def once(call: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        model.load_state_dict(before)
        torch.manual_seed(0)
        return call(), {k: v.clone() for k, v in model.state_dict().items()}

    expected, state = once(lambda: model(x()))
    actual, other = once(lambda: run(traced, x()))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(other, state)
    assert state["norm.num_batches_tracked"] == training


@BOTH
def test_tracing_leaves_the_model_and_the_random_states_as_they_were(tracer: str) -> None:
    model = Noisy()
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    buffers = [(b, b.clone(), b._version) for b in model.buffers()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    trace(model, (x(),), tracer=tracer)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    for buffer, (old, value, _) in zip(model.buffers(), buffers, strict=True):
        assert buffer is old and torch.equal(buffer, value)


@BOTH
def test_what_the_model_stores_on_itself_is_put_back(tracer: str) -> None:
    class Remembers(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return super().forward(x)

    model = Remembers()
    trace(model, (x(),), tracer=tracer)
    assert not hasattr(model, "last")


@BOTH
def test_parameters_and_their_names_are_the_models(tracer: str) -> None:
    model = Tied()
    traced = trace(model, (x(),), tracer=tracer)
    own = dict(model.named_parameters(remove_duplicate=False))
    names = dict(traced.graph_module.named_parameters(remove_duplicate=False))
    assert names and all(own[name] is parameter for name, parameter in names.items())
    assert {*map(id, names.values())} == {*map(id, own.values())}
    if tracer == "symbolic":
        assert traced.graph_module.b is model.b


@BOTH
def test_gradients_of_tied_parameters_are_the_models(tracer: str) -> None:
    model = Tied()
    traced = trace(model, (x(),), tracer=tracer)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x()).square().sum(), parameters)
    actual = torch.autograd.grad(run(traced, x()).square().sum(), parameters)
    torch.testing.assert_close(actual, expected)


@BOTH
def test_nodes_know_their_module_and_line(tracer: str) -> None:
    graph = trace(Tied(), (x(),), tracer=tracer).graph_module.graph
    node = next(n for n in reversed(graph.nodes) if n.op == "call_function")
    assert "+ self.shift" in node.meta["stack_trace"]
    stacks = [list(node.meta.get("nn_module_stack", {}).values()) for node in graph.nodes]
    assert {stack[-1][0] for stack in stacks if stack} >= {"a", "b"}


def test_a_buffer_is_read_at_each_call() -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.scale * 2)

    model = Scaled()
    traced = trace(model, (x(),))
    assert traced.front_end == "symbolic"
    model.scale.fill_(3)
    assert torch.equal(run(traced, x()), x() * 6)


def test_frozen_random_numbers_are_refused() -> None:
    class Jitter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(8)

    assert trace(Jitter(), (x(),)).front_end == "export"


def test_an_error_of_the_model_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trace(MLP(), (x(4, 9),))


class Box:
    def __init__(self, value: Tensor, scale: float = 2.0) -> None:
        self.value, self.scale = value, scale


@BOTH
def test_objects_of_any_class_are_inputs_and_outputs(tracer: str) -> None:
    class Reboxes(nn.Module):
        def forward(self, box: Box) -> dict[str, Any]:
            return {"box": Box(box.value * box.scale, box.scale)}

    traced = trace(Reboxes(), (Box(x()),), tracer=tracer)
    assert placeholders(traced) == ["box_value"]
    given = Box(x(3))
    output = run(traced, given)["box"]
    assert type(output) is Box and output.scale == 2.0
    assert torch.equal(output.value, x(3) * 2) and output.value is not given.value
    one, two = (input_key(Reboxes(), (Box(x(), scale),), {}) for scale in (2.0, 3.0))
    assert one != two, "what is not a tensor is constant"


def test_an_array_is_no_input() -> None:
    with pytest.raises(TraceError, match="an input is a ndarray, whose values a graph cannot see"):
        trace(MLP(), (x().numpy(),))


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(TraceError, match="run it once"):
        trace(nn.LazyLinear(4), (x(),))


class Round(torch.autograd.Function):
    """Rounds, and hands the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Quantized(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return Round.apply(super().forward(x))


def test_an_autograd_function_keeps_its_backward() -> None:
    model = Quantized()
    traced = trace(model, (x(),))
    assert traced.front_end == "symbolic"
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x()).sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x()).sum(), parameters), expected)
    assert expected[-1].any()


def test_functions_that_other_threads_call_meanwhile_are_none_of_the_models() -> None:
    rounded: list[Tensor] = []

    class Beside(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                other = threading.Thread(target=lambda: rounded.append(Round.apply(torch.ones(2))))
                other.start()
                other.join()
            return super().forward(x)

    traced = trace(Beside(), (x(),), tracer="export")
    assert rounded
    assert traced.otherwise is None, "no Function of the model's to be kept whole"


def test_a_graph_that_lost_a_backward_is_refused() -> None:
    with pytest.raises(TraceError, match="export: its graph has another gradient for layers"):
        trace(Quantized(), (x(),), tracer="export")


class Straight(nn.Module):
    """Rounds within, and has a branch on a fixed size, so that fx does not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rounded, self.last = nn.Linear(8, 8), Quantized(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rounded(self.first(x))
        return self.last(y) if x.shape[1] > 2 else y


def test_a_module_that_calls_one_is_kept_whole_by_export() -> None:
    model = Straight()
    traced = trace(model, (x(),))
    assert traced.front_end == "export"
    kept = [name for name, m in traced.graph_module.named_modules() if isinstance(m, Whole)]
    assert kept == ["rounded"]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x()).sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x()).sum(), parameters), expected)


class Recomputed(torch.autograd.Function):
    """A reversible layer's way: its backward runs one of its own, which adds to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grads[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, self.layer) if x.shape[1] > 2 else x


def test_gradients_that_a_backward_adds_up_by_itself_are_not_left_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Reversible(), nn.Linear(8, 8))
    model[0].weight.grad = before = torch.ones(8, 8)
    traced = trace(model, (x(),))
    assert [p.grad for p in model.parameters()][1:] == [None] * 5
    assert model[0].weight.grad is before and before.eq(1).all()
    model.zero_grad()
    run(traced, x()).sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x()).sum().backward()
    assert same(found, [p.grad for p in model.parameters()])


def test_distributions_may_look_at_their_parameters(monkeypatch) -> None:
    # Dynamo, where it has been at work, has left them as lenient as it needs them.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            normal = torch.distributions.Normal(self.mean(x), self.spread(x).exp())
            return -normal.log_prob(y).mean(-1)

    model = Variational()
    traced = trace(model, (x(), x() + 1))
    assert same(run(traced, x(), x() + 1), model(x(), x() + 1))
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)  # as strict as they were


class Detour(nn.Module):
    """Two ways to the same values: one of them without gradients for the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not isinstance(y, fx.Proxy):
            y = y.detach()
        return self.b(y)


def test_a_symbolic_graph_with_the_same_values_and_other_gradients_is_refused() -> None:
    with pytest.raises(TraceError, match=r"symbolic: its graph has another gradient for a\.weight"):
        trace(Detour(), (torch.randn(4, 4),), tracer="symbolic")


def test_a_graph_with_the_history_of_the_model_needs_no_backward(monkeypatch) -> None:
    """For it takes a gradient of every parameter, which is as much memory again."""

    def backward(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward was run")

    monkeypatch.setattr(torch.autograd, "grad", backward)
    trace(MLP(), (x(),), tracer="symbolic")


def test_an_output_may_be_a_parameter() -> None:
    class Temperature(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x) * self.scale, self.scale

    output, scale = run(trace(model := Temperature(), (x(),), tracer="symbolic"), x())
    assert scale is model.scale
    assert torch.equal(output, model(x())[0])


def test_a_custom_tracer_is_used_and_checked() -> None:
    model = MLP()
    traced = trace(model, (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m))
    assert traced.front_end == "custom"
    assert torch.equal(run(traced, x()), model(x()))

    class Defaults(nn.Module):
        def forward(self, x: Tensor, y: int = 3) -> Tensor:
            return x * y

    with pytest.raises(TraceError, match="2 placeholders for 1 input tensors"):
        trace(Defaults(), (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m))
    with pytest.raises(TraceError, match="differs on the example: output: Tensor-likes"):
        trace(model, (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m.layers))
    with pytest.raises(TraceError, match="returned a MLP"):
        trace(model, (x(),), tracer=lambda m, args, kwargs: m)
    with pytest.raises(ValueError, match="tracer is 'dynamo'"):
        trace(model, (x(),), tracer="dynamo")


@pytest.mark.parametrize("name", ["GPT2", "Bert"])
@pytest.mark.parametrize("training", [True, False])
def test_hugging_face_models_are_traced(name: str, training: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = (
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        if name == "GPT2"
        else {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
        }
    )
    config = getattr(transformers, f"{name}Config")(vocab_size=32, use_cache=False, **sizes)
    kind = "GPT2LMHeadModel" if name == "GPT2" else "BertForSequenceClassification"
    model = getattr(transformers, kind)(config).train(training)
    ids = torch.arange(32).view(4, 8) % 32
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kwargs["labels"] = ids if name == "GPT2" else torch.tensor([0, 1, 0, 1])
    traced = trace(model, (), kwargs)
    for batch in 1, 2, 4:
        part = {key: value[:batch] for key, value in kwargs.items()}
        torch.manual_seed(0)
        expected = model(**part)
        torch.manual_seed(0)
        actual = run(traced, **part)
        assert type(actual) is type(expected)
        torch.testing.assert_close(dict(actual), dict(expected))
    own = dict(model.named_parameters(remove_duplicate=False))
    for key, parameter in traced.graph_module.named_parameters(remove_duplicate=False):
        assert own[key] is parameter
    expected_grads = torch.autograd.grad(model.eval()(**kwargs).loss, list(model.parameters()))
    traced = trace(model, (), kwargs)
    actual_grads = torch.autograd.grad(run(traced, **kwargs).loss, list(model.parameters()))
    torch.testing.assert_close(actual_grads, expected_grads)


def test_a_branch_beyond_the_batch_is_no_hindrance():
    class Branches(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.contiguous() if x.shape[0] >= 64 else x)

    traced = trace(Branches(), (x(8),))
    assert (traced.front_end, traced.largest_batch) == ("export", 63)
    with pytest.raises(TraceError, match="it branches on its batch size"):
        trace(Branches(), (x(80),))


class Scales(MLP):
    """Writes to its weights when it is called for the first time."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                self.layers[0].weight.mul_(2)
            self.done = True
        return super().forward(x)


def test_a_model_that_writes_to_its_weights_once_is_to_be_called_first() -> None:
    model = Scales()
    before = model.layers[0].weight.detach().clone()
    with pytest.raises(TraceError, match=r"layers.0.weight, by .*mul_\(2\)\) when it is first"):
        trace(model, (x(),))
    assert torch.equal(model.layers[0].weight, before) and not model.done
    model(x())
    traced = trace(model, (x(),))
    assert torch.equal(run(traced, x()), model(x()))
    assert torch.equal(model.layers[0].weight, before * 2)


def test_a_model_that_writes_to_its_weights_and_cannot_be_traced_is_told_so() -> None:
    class Keeps(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.layers[0].weight.data.copy_(y.sum() * torch.eye(8))
            return y if y.sum() > 0 else -y

    with pytest.raises(TraceError, match=r"It writes to its parameters: layers.0.weight, by .*eye"):
        trace(Keeps(), (x(),))


def test_a_model_that_writes_to_its_weights_at_every_call_may_and_tracing_does_not() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    ids = torch.arange(6) % 4
    traced = trace(model, (ids,))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(run(traced, ids), model(ids))


def test_a_module_that_is_converted_to_what_it_is_already_is_exported() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.linear = self.linear.to(torch.float32)
            return self.linear(x)

    model = Converts()
    traced = trace(model, (x(),), tracer="export")
    assert torch.equal(run(traced, x()), model(x()))


@BOTH
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_of_a_norm_are_kept_where_its_output_is_of_no_use(tracer, norm) -> None:
    """An auxiliary head, say, that is run in training and not asked."""

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = norm(3, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(self.linear(x))
            return x * 2

    model = Auxiliary()
    given = torch.randn(4, 3, 8)
    traced = trace(model, (given,), tracer=tracer)
    before = model.norm.running_mean.clone()
    run(traced, given)
    assert not torch.equal(model.norm.running_mean, before)
    traced = trace(model.eval(), (given,), tracer="export")
    assert len(traced.graph_module.graph.nodes) == 3, "in eval mode it writes nothing"


def test_a_model_that_takes_no_larger_batch_is_compared_on_the_example():
    class AtMostFour(nn.Module):
        def forward(self, x):
            if x.shape[0] > 4:
                raise ValueError("too many rows")
            return x * 2

    class FirstRow(nn.Module):  # as good on one row
        def forward(self, x):
            return x[:1].expand_as(x) * 2

    def tracer(model, args, kwargs):
        return fx.symbolic_trace(FirstRow())

    with pytest.raises(TraceError, match="differs on the example: output"):
        trace(AtMostFour(), (torch.randn(4, 3),), tracer=tracer)


def test_the_code_says_nothing_of_a_type_that_the_model_did_not():
    """fx takes the annotation of the function that it traces, which is the tracer's own."""
    traced = trace(MLP(), (x(),), tracer="symbolic")
    assert "->" not in traced.graph_module.code
