"""A pipeline that is compiled with ``training=False`` computes outputs only."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import fxpipe
from fxpipe.ir.text import human_bytes
from tests.zoo import MLP, MODELS, Tied, outputs_of_loop

X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))


def inferring(model, devices=2, **options):
    return fxpipe.compile(model, ["cpu"] * devices, **{"chunks": 3, "training": False, **options})


# --------------------------------------------------------------------------------- what it computes


@pytest.mark.covering(1)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_loop_over_micro_batches_bit_for_bit(name, stages):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), inputs(6)
    own = copy.deepcopy(model)
    with inferring(own, stages) as pipe:
        output = pipe(*x)
    with torch.no_grad():
        expected = torch.cat(outputs_of_loop(model, x, 3))
    assert torch.equal(output, expected)
    for (path, buffer), other in zip(model.named_buffers(), own.buffers(), strict=True):
        assert torch.equal(buffer, other), f"{path}, which the forward writes to"


def test_dropout_goes_by_train_and_eval_as_in_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 12))
    with inferring(model) as pipe:
        torch.manual_seed(1)
        dropped = pipe(X)
        torch.manual_seed(1)
        assert torch.equal(pipe(X), dropped)
        pipe.eval()
        assert not torch.equal(pipe(X), dropped)
        assert torch.equal(pipe(X), torch.cat([model(x) for x in X.split(2)]))


# -------------------------------------------------------------------------------- without gradients


def test_nothing_is_recorded_and_a_backward_is_refused_at_the_output():
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed)
    with inferring(MLP()) as pipe:
        with hooks:
            output = pipe(X)
        assert not saved
        loss = output.square().mean() + sum(p.sum() for p in pipe.parameters())
        with pytest.raises(RuntimeError, match="compiled with training=False, which keeps nothing"):
            loss.backward()


def test_outputs_say_that_they_require_a_gradient_where_those_of_the_model_do():
    model = MLP()
    with inferring(model) as pipe:
        assert pipe(X).requires_grad
        with torch.no_grad():
            assert not pipe(X).requires_grad
        with torch.inference_mode():
            assert pipe(X).is_inference()
        model.requires_grad_(False)
        assert not pipe(X).requires_grad
        assert pipe(X.clone().requires_grad_()).requires_grad


def test_a_transform_goes_through_where_no_gradients_are_recorded():
    model, direction = MLP(), torch.ones_like(X)
    several = torch.stack([X, X + 1])
    with inferring(model, example_inputs=(X,)) as pipe:
        for transformed in (
            lambda: torch.vmap(pipe)(several),
            lambda: torch.func.jvp(pipe, (X,), (direction,)),
        ):
            with pytest.raises(RuntimeError, match="only where no gradients are recorded"):
                transformed()
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(pipe)(several)[0], pipe(X))
            _, along = torch.func.jvp(pipe, (X,), (direction,))
            torch.testing.assert_close(along, torch.func.jvp(model, (X,), (direction,))[1])


def test_a_tangent_is_not_lost():
    with inferring(MLP(), example_inputs=(X,)) as pipe, forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(RuntimeError, match="only where no gradients are recorded"):
            pipe(dual)
        with torch.no_grad():
            assert forward_ad.unpack_dual(pipe(dual)).tangent is not None


def test_outputs_may_be_written_to_and_their_values_used():
    with inferring(MLP()) as pipe:
        output = pipe(X)
        output += 1
        assert torch.equal(output.detach(), pipe(X).detach() + 1)


class Twice(nn.Module):
    """Returns one tensor under two names, an integer tensor, and a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        y = self.layer(x)
        return {"y": y, "same": y, "best": y.argmax(1), "width": 12}


def test_the_structure_of_outputs_is_the_models():
    with inferring(Twice(), 1) as pipe:
        output = pipe(X)
        assert output["y"] is output["same"] and output["width"] == 12
        assert not output["best"].requires_grad


def test_the_graph_has_no_nodes_for_the_order_of_a_backward():
    with inferring(MLP(), example_inputs=(X,)) as pipe:
        assert "fork" not in pipe.code and "join" not in pipe.code
    with inferring(MLP(), training=True, example_inputs=(X,)) as pipe:
        assert "fork" in pipe.code and "join" in pipe.code


def test_a_pipeline_keeps_to_it_when_it_is_pickled():
    import pickle

    with inferring(MLP(), example_inputs=(X,)) as pipe, pickle.loads(pickle.dumps(pipe)) as other:
        assert torch.equal(other(X), pipe(X))
        with pytest.raises(RuntimeError, match="compiled with training=False"):
            other.step(X)


class Centred(torch.autograd.Function):
    """The identity; its backward puts rows together."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class CentredGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.second(Centred.apply(self.first(x)))


def test_a_backward_that_puts_rows_together_is_no_reason_to_refuse_a_call():
    model = CentredGradients()
    with pytest.raises(fxpipe.BatchError, match="gradient of first"):
        inferring(model, training=True, example_inputs=(X,))
    with inferring(model) as pipe:
        assert torch.equal(pipe(X), torch.cat([model(x) for x in X.split(2)]))


# ------------------------------------------------------------------------------------- memory, time


class Heavy(nn.Module):
    """Two tables that take no time and much memory, and layers that are the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(5_000, 32), nn.Embedding(5_000, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

    def forward(self, tokens):
        return self.layers(self.embed(tokens) + self.table(tokens))


TOKENS = torch.arange(64).reshape(16, 4)
TABLE = 5_000 * 32 * 4


def test_neither_gradients_nor_states_of_an_optimizer_nor_activations_count():
    options = {"example_inputs": (TOKENS,), "chunks": 4}
    with inferring(Heavy(), **options) as pipe:
        state = sum(p.nbytes for p in pipe.parameters())
        outputs = sum(stage.cost.activation_bytes for stage in pipe.stages)
        assert outputs == 16 * 4 * 32 * 4
        # An output is put together of those of the micro-batches, and a few values are there.
        assert state < sum(pipe.timeline().peak_memory) < state + 6 * outputs
        assert all(stage.cost.backward_s == 0 for stage in pipe.stages)
        assert "memory of the lanes (predicted, without gradients): " in pipe.report()
    with inferring(Heavy(), training=True, **options) as pipe:
        assert sum(pipe.timeline().peak_memory) > 4 * state


def test_the_cut_keeps_to_the_memory_of_the_weights():
    limit = 1.1 * TABLE
    model = Heavy()
    with inferring(model, memory=limit, example_inputs=(TOKENS,)) as pipe:
        assert max(pipe.timeline().peak_memory) <= limit
        assert f" of {human_bytes(round(limit))}, " in pipe.report()
        assert pipe.stages[0].contains == "embed"
        assert torch.equal(pipe(TOKENS), torch.cat(outputs_of_loop(model, (TOKENS,), 3)))
    with pytest.raises(fxpipe.DoesNotFit) as error:
        inferring(model, memory=limit, training=True, example_inputs=(TOKENS,))
    with pytest.raises(fxpipe.DoesNotFit) as error:
        inferring(model, memory=0.9 * TABLE, example_inputs=(TOKENS,))
    assert not re.search("checkpoint|schedule", str(error.value)), "these change nothing"


class Recurrent(nn.Module):
    """A layer whose backward takes much longer, for its forward, than that of the others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 32)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_the_cut_goes_by_the_time_of_the_forward():
    """The first layer has no backward, so that only in training it takes less time."""
    model, x = Recurrent(), torch.randn(6, 32)
    seconds = {}
    for training in (False, True):
        with inferring(model, training=training, example_inputs=(x,)) as pipe:
            nodes = {
                node.target: node.meta["cost"]
                for node in pipe.model_graph.graph.find_nodes(op="call_module")
            }
            seconds[training] = [nodes[name].seconds for name in ("first", "second", "third")]
    assert len(set(seconds[False])) == 1
    assert seconds[True][0] < seconds[True][1]


def test_a_weight_that_two_stages_share_comes_without_its_gradient():
    """On simulated links; here, that the plan counts the weight once more, and no gradient."""
    model = Tied()
    x = torch.zeros(6, 5, dtype=torch.long)
    plans = [
        fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,), chunks=3, training=training)
        for training in (False, True)
    ]
    one, two = (sum(stage.state_bytes for stage in plan.stages) for plan in plans)
    weights = sum(p.nbytes for p in model.parameters())
    assert weights < one < 2 * weights
    assert two > 4 * weights


# ------------------------------------------------------------------------------------- measurements


def test_calls_are_predicted_and_measured_in_place_of_steps():
    with inferring(MLP()) as pipe:
        pipe(X)
        predicted, measured = pipe.timeline(), pipe.measure(X, rounds=1)
        for timeline in (predicted, measured):
            assert [str(span.action) for span in timeline.spans if span.lane == 1] == [
                *("1F0", "1F1", "1F2")
            ]
        assert predicted.name == "forward (predicted)" and measured.makespan > 0
        assert not hasattr(pipe, "step_graph")
        with pytest.raises(ValueError, match="no step graph, as the model was compiled with tr"):
            pipe.draw("step")


def test_the_page_of_the_report_is_written(tmp_path):
    with inferring(MLP(), example_inputs=(X,)) as pipe:
        pipe.report_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "outputs" in page and "Training step" not in page


def test_with_a_backend_stages_are_compiled_for_their_forwards():
    model = MLP().eval()
    with inferring(model, stage_backend="eager") as pipe:
        assert torch.equal(pipe(X), torch.cat([model(x) for x in X.split(2)]))


def test_the_cache_on_disk_keeps_both_apart(tmp_path):
    for training in (False, True, False, True):
        with inferring(MLP(), training=training, cache=tmp_path) as pipe:
            output = pipe(X)
            assert ("fork" in pipe.code) is training
    assert output.requires_grad


def test_what_explains_it_is_about_calls_and_suggests_what_a_call_can_have():
    with inferring(MLP(), chunks=2, example_inputs=(X,)) as pipe:
        said = str(pipe.explain())
    assert "A call takes" in said and "pipe.measure(x)" in said
    assert " step" not in said and "tune" not in said
    assert ": a call is predicted to take" in said, "as its suggestions say"
    assert "schedule=" not in said and "checkpoint=" not in said
