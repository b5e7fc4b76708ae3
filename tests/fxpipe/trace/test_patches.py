"""PyTorch is patched while a model is compiled; only the thread that compiles sees it."""

import builtins
import inspect
import logging
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxpipe
from fxpipe.trace import patches
from fxpipe.trace.functions import functions_called
from fxpipe.trace.premises import attributes_read
from fxpipe.trace.reads import values_read
from fxpipe.trace.running import Running

PATCHED = [
    (nn.Module, "__getattribute__"),
    (nn.Module, "_apply"),
    (torch.autograd.Function, "apply"),
    (Distribution, "_validate_args"),
    (torch.autograd, "grad"),
    (torch.autograd, "backward"),
    (Tensor, "data"),
    (ShapeEnv, "create_unbacked_symint"),
    (logging.Logger, "handle"),
    (builtins, "print"),
]


def elsewhere(function):
    """What a function gives in another thread."""
    values, errors = [], []

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    for error in errors:
        raise error
    return values[0]


@pytest.fixture
def everything_patched(monkeypatch):
    """All patches, as an export in the middle of a compile has them."""
    monkeypatch.setattr(Distribution, "_validate_args", True)  # Dynamo, if imported, has it off
    with ExitStack() as stack:
        for patch in (
            attributes_read(nn.Linear(2, 2)),
            functions_called({}),
            patches.eased(),
            patches.data_used(detached=True),
            values_read(Running()),
            patches.silent(),
            patches.prints(),
        ):
            stack.enter_context(patch)
        yield


def raw(owner, name):
    return inspect.getattr_static(owner, name, None)


def test_all_is_as_it_was_afterwards() -> None:
    before = [raw(owner, name) for owner, name in PATCHED]
    stderr = sys.stderr
    with (
        attributes_read(nn.Linear(2, 2)),
        functions_called({}),
        patches.eased(),
        patches.data_used(detached=True),
        values_read(Running()),
        patches.silent(),
        patches.prints(),
    ):
        during = [raw(owner, name) for owner, name in PATCHED]
        assert not any(one is other for one, other in zip(before, during, strict=True))
    after = [raw(owner, name) for owner, name in PATCHED]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert sys.stderr is stderr


def test_another_thread_converts_and_shares_its_modules(everything_patched) -> None:
    def work() -> tuple[bool, bool]:
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).share_memory()
        weight = module.weight
        return weight.is_contiguous(memory_format=torch.channels_last), weight.is_shared()

    assert elsewhere(work) == (True, True)
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # left alone in this one
    assert not module.weight.is_contiguous(memory_format=torch.channels_last)


def test_another_thread_has_its_distributions_validated(everything_patched) -> None:
    def work() -> str:
        with pytest.raises(ValueError) as error:
            torch.distributions.Normal(0.0, -1.0)
        return str(error.value)

    assert "scale" in elsewhere(work)
    torch.distributions.Normal(0.0, -1.0)


def test_another_thread_has_its_tracebacks_printed_and_its_logs(capsys, caplog) -> None:
    def work() -> None:
        try:
            raise KeyError("of the other thread")
        except KeyError:
            traceback.print_exc()
        logging.getLogger("torch.other").warning("from the other thread")

    with patches.silent():
        elsewhere(work)
        print("of this thread", file=sys.stderr)
        logging.getLogger("torch.other").warning("from this thread")
        logging.getLogger("mine").warning("not PyTorch's")
    error = capsys.readouterr().err
    assert "of the other thread" in error and "of this thread" not in error
    assert [r.getMessage() for r in caplog.records] == ["from the other thread", "not PyTorch's"]


def test_another_thread_computes_gradients(everything_patched) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    def work() -> float:
        x = torch.tensor(3.0, requires_grad=True)
        x.data = x.data + 1
        (gradient,) = torch.autograd.grad(Square.apply(x), x)
        return gradient.item()

    assert elsewhere(work) == 8.0


def test_a_patch_on_a_patch_adds_to_it() -> None:
    model = nn.Linear(2, 2)
    model.k = 1  # type: ignore[assignment]
    with attributes_read(model) as outer, attributes_read(model) as inner:
        _ = model.k
    assert set(outer) == set(inner) == {(model, "k")}
    _ = model.in_features
    assert (model, "in_features") not in outer


def test_a_stream_that_somebody_redirects_meanwhile_is_theirs(capsys) -> None:
    before = sys.stderr
    with patches.silent():
        held = sys.stderr
        sys.stderr = other = type("Stream", (), {})()
    assert sys.stderr is other
    sys.stderr = held  # as they put back what they have found
    print("seen", file=sys.stderr)
    sys.stderr = before
    assert "seen" in capsys.readouterr().err


FIRST_TRACE = """
import gc, torch, fxpipe
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))

model = Model()
own = set(map(id, model.parameters()))
pipe = fxpipe.compile(model, ["cpu"] * 2, example_inputs=(torch.ones(4, 4),))
gc.collect()
kept = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and each.numel()]
print(len([parameter for parameter in kept if id(parameter) not in own]))
"""


def test_the_first_trace_of_a_process_leaves_no_memory_of_the_model_behind() -> None:
    """PyTorch lists all functions of tensors when the first one is traced: replacements in its list
    would keep the twin's parameters, and so the memory in which the model has been."""
    command = [sys.executable, "-W", "ignore", "-c", FIRST_TRACE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_no_warning_of_this_thread_is_given_within_unwarned_and_all_others_are():
    def said():
        warnings.warn("a shape is broadcast", stacklevel=1)
        torch.ones(1).std()  # a warning that is not given by Python code

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        filters = [*warnings.filters]
        with patches.unwarned():
            said()
            with patches.unwarned():
                said()
            said()
            assert caught == []
            elsewhere(lambda: warnings.warn("of another thread", stacklevel=1))
            assert [str(each.message) for each in caught] == ["of another thread"]
        assert warnings.filters == filters
        said()  # by default a warning is given once for a line
        assert len(caught) == 3


def test_the_warnings_of_some_modules_only_may_be_dropped():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with patches.unwarned(r"torch\."):
            warnings.warn_explicit("dropped", UserWarning, "_tensor.py", 1, "torch._tensor")
            warnings.warn_explicit("given", UserWarning, "vision.py", 1, "torchvision.ops")
        assert [str(each.message) for each in caught] == ["given"]


def test_a_filter_that_makes_errors_of_warnings_makes_none_within_unwarned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with patches.unwarned():
            warnings.warn("a shape is broadcast", stacklevel=1)
        with pytest.raises(UserWarning, match="broadcast"):
            warnings.warn("a shape is broadcast", stacklevel=1)


def test_unwarned_ends_where_the_filters_have_been_copied_meanwhile():
    with ExitStack() as stack:
        block = ExitStack()
        block.enter_context(patches.unwarned())
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        block.close()
        warnings.warn("of the user", stacklevel=1)
        assert [str(each.message) for each in caught] == ["of the user"]


class Plain(nn.Module):
    """Computes with a tensor of PyTorch's own class, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x.as_subclass(Tensor)).relu())
        return y


class Picture(Tensor):
    pass


def test_an_export_keeps_track_of_a_tensor_that_is_made_a_plain_one() -> None:
    model, x = Plain(), torch.randn(4, 4, requires_grad=True)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        (one,) = torch.autograd.grad(pipe(x).square().sum(), x)
        (other,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(one, other)


def test_of_an_input_of_another_class_none_is_made_in_a_graph() -> None:
    pipe = fxpipe.compile(Plain(), ["cpu"] * 2, chunks=2)
    with pytest.raises(fxpipe.TraceError, match=r"a Picture in place of a Tensor"):
        pipe(torch.randn(4, 4).as_subclass(Picture))


class LooksForAGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y: Tensor = self.b(h * 2 if h.grad is None else h)
        return y


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_no_warning_of_a_trace_names_a_line_of_pytorchs(tracer: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxpipe.compile(
            LooksForAGradient(),
            ["cpu"] * 2,
            chunks=2,
            tracer=tracer,
            example_inputs=(torch.randn(4, 4),),
        )
    files = {each.filename for each in caught if ".grad attribute" in str(each.message)}
    assert files <= {__file__}
