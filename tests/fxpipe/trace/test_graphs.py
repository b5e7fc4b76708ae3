"""Both front ends give graphs that do what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.trace import trace
from tests.fxpipe.trace.small import BOTH, MLP, Noisy, Tied, placeholders, run, x


def test_symbolic_graph_is_the_model_bitwise_at_every_batch_size() -> None:
    model = MLP()
    traced = trace(model, (x(),))
    assert traced.front_end == "symbolic"
    assert placeholders(traced) == ["x"]
    for batch in 1, 3, 16:
        assert torch.equal(run(traced, x(batch)), model(x(batch)))


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


def test_buffers_may_be_sparse() -> None:
    class Propagates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("edges", torch.eye(8).roll(1, 0).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, self.layer(x).t()).t()

    model = Propagates()
    traced = trace(model, (x(),))
    assert torch.equal(run(traced, x(3)), model(x(3)))


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


def test_a_node_that_export_adds_belongs_to_no_module() -> None:
    class Flat(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(x.shape[0] * x.shape[1], 4)).view(x.shape[0], -1, 4)

    graph = trace(Flat(4, 4), (torch.randn(5, 3, 4),), tracer="export").graph_module.graph
    sizes = [node for node in graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert sizes and not any(node.meta.get("nn_module_stack") for node in sizes)


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


def test_an_error_of_the_model_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trace(MLP(), (x(4, 9),))


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


@pytest.mark.covering(1)
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


def test_the_code_says_nothing_of_a_type_that_the_model_did_not():
    """fx takes the annotation of the function that it traces, which is the tracer's own."""
    traced = trace(MLP(), (x(),), tracer="symbolic")
    assert "->" not in traced.graph_module.code


def test_a_part_that_torch_compile_has_been_given_is_looked_into() -> None:
    class Compiled(MLP):
        @torch.compile(backend="eager", fullgraph=True)
        def end(self, x: Tensor) -> Tensor:
            return x.relu() * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.end(super().forward(x))

    model = Compiled()
    traced = trace(model, (x(),))
    assert torch.equal(run(traced, x(3)), torch.relu(MLP.forward(model, x(3))) * 2)
