"""A pipeline as an object: compiled, copied, looked at and closed."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import MLP, ResNet, loss_of, same

X = torch.ones(6, 12)


TWO = ["cpu", "cpu"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_pipeline_survives(way):
    model, x = ResNet(), torch.randn(6, 3, 8, 8)
    pipe = fxpipe.compile(model, TWO, chunks=3, partition=["layers.1"], checkpoint="always")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    output = pipe(x)
    model.load_state_dict(before)
    if way == "deepcopy":
        twin = copy.deepcopy(pipe)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(pipe))
    else:
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert twin.code == pipe.code
    assert same(twin(x), output)
    assert all(p is not q for p, q in zip(twin.parameters(), pipe.parameters(), strict=True))
    assert all(p is q for p, q in zip(twin.parameters(), twin.module.parameters(), strict=True))
    pipe.close()
    twin.close()


def test_the_number_of_micro_batches_is_chosen_and_said():
    with fxpipe.compile(MLP(), TWO) as pipe:
        pipe(X)
        assert pipe.chunks == 6, "four for each stage, but the batch has six rows"
        pipe(torch.ones(20, 12))
        assert pipe.chunks == 8
        assert '8 micro-batches (the default; chunks="auto" chooses)' in pipe.report()
    with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,)) as pipe:
        assert "2 micro-batches, bubble 3" in pipe.report()


def test_what_the_model_has_the_pipeline_has_but_for_methods():
    class Configured(MLP):
        def __init__(self):
            super().__init__()
            self.config = {"hidden": 12}

        @property
        def dtype(self):
            return self.layers[0].weight.dtype

        def encode(self):
            return self(torch.ones(1, 12))

    model = Configured()
    pipe = fxpipe.compile(model, TWO)
    assert pipe.layers is model.layers
    assert pipe.config is model.config
    assert pipe.dtype == torch.float32
    pipe.config = {"hidden": 13}
    assert model.config == {"hidden": 13}
    pipe.note = "new"
    assert model.note == "new"
    with pytest.raises(AttributeError, match=r"no attribute 'encode'.*take pipe.module.encode"):
        _ = pipe.encode
    with pytest.raises(AttributeError, match=r"no attribute 'confic'$"):
        _ = pipe.confic


def test_it_takes_what_the_model_takes_for_those_who_ask():
    class Named(MLP):
        def forward(self, x, *, scale: float = 1.0):
            return super().forward(x) * scale

    pipe = fxpipe.compile(Named(), TWO)
    assert str(inspect.signature(pipe.forward)) == "(x, *, scale: 'float' = 1.0)"
    assert str(inspect.signature(type(pipe).forward)).startswith("(self, *args")
    torch.testing.assert_close(pipe.forward(torch.ones(4, 12), scale=0.0), torch.zeros(4, 12))


def test_a_closed_pipeline_says_so_and_the_model_works_on():
    model = MLP()
    pipe = fxpipe.compile(model, TWO, chunks=2)
    pipe(X)
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="this pipeline is closed: compile the model again"):
        pipe(X)
    model(X)


def test_what_a_trace_cannot_see_is_seen_after_recompile():
    scale = 1.0

    class Scaled(MLP):
        def forward(self, x):
            return super().forward(x) * scale

    model, x = Scaled(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        scale = 2.0
        pipe.recompile()
        torch.testing.assert_close(pipe(x), model(x))


def test_the_first_call_may_be_in_inference_mode():
    model, x = MLP(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        with torch.inference_mode():
            assert same(pipe(x * 1), torch.cat([model(part * 1) for part in x.chunk(2)]))
        loss_of(pipe(x)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_inputs_are_let_go_after_a_call():
    gc.collect()
    gc.disable()
    try:
        with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,)) as pipe:
            x = torch.randn(4, 12)
            ref = weakref.ref(x)
            with torch.no_grad():
                pipe(x)
            del x
            assert ref() is None
    finally:
        gc.enable()


@pytest.mark.covering(1)
@pytest.mark.parametrize("runs", ["model", "pipeline"])
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_other_threads_go_on_while_a_model_is_compiled(tracer, runs):
    model, x, failed, done = MLP(), torch.randn(4, 12), [], threading.Event()
    if runs == "pipeline":
        model = fxpipe.compile(model, TWO, chunks=2)
    expected = model(x)

    def work():
        while not done.is_set():
            try:
                assert same(model(x), expected)
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(2):
            inputs = (torch.randn(4, 3, 8, 8),)
            fxpipe.compile(ResNet(), TWO, chunks=2, tracer=tracer, example_inputs=inputs)
    finally:
        done.set()
        thread.join()
    assert failed == []


def test_every_public_name_is_there():
    assert all(getattr(fxpipe, name) is not None for name in fxpipe.__all__)
    assert set(fxpipe.__all__) == {*fxpipe._HOMES, "loss_weight", "skip"}
    assert set(fxpipe.__all__) <= set(dir(fxpipe)), "an editor completes names by dir()"


ERRORS = [
    name
    for name in fxpipe.__all__
    if isinstance(kind := getattr(fxpipe, name), type) and issubclass(kind, Exception)
]


def test_many_errors_are_public():
    assert {"BatchWarning", "DoesNotFit", "TraceError"} < set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_a_traceback_names_an_error_as_users_import_it_and_so_does_its_pickle(name):
    error = getattr(fxpipe, name)("why")
    assert traceback.format_exception_only(error) == [f"fxpipe.{name}: why\n"]
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error) and copied.args == ("why",)


def test_errors_have_their_public_names_before_anyone_has_looked_them_up():
    script = (
        "import fxpipe, torch\n"
        "fxpipe.compile(torch.nn.Linear(2, 2), ['cpu'] * 2, partition=['a'])(torch.ones(4, 2))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("fxpipe.PartitionError: partition names 'a'")


def test_a_stage_says_what_it_is_in_a_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with fxpipe.compile(
        model, ["cpu"] * 2, partition=["1"], example_inputs=(torch.ones(6, 4),)
    ) as pipe:
        first, second = map(repr, pipe.stages)
    # A node for the input, the layer and the output; 4 * 4 + 4 floats, and 4 * 2 + 2.
    assert first.startswith("Stage(0 on cpu: 3 nodes, parameters 80 B, forward ")
    assert second.startswith("Stage(1 on cpu: 3 nodes, parameters 40 B, forward ")
    assert first.endswith(", contains 0)") and second.endswith(", contains 1)")
    assert "\n" not in first + second
