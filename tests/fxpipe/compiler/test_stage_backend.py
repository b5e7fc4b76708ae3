"""Stages that a backend of ``torch.compile`` compiles, each by itself."""

import copy
import importlib
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.runtime.compiled import stage as compiled_stage
from fxpipe.runtime.compiled.stage import StageBackend

pytestmark = pytest.mark.filterwarnings("error:.*is not compiled")

BATCH = 11  # not a multiple of the number of micro-batches


class Mixed(nn.Module):
    """A batch norm, whose buffers are written to; dropout; a skip; a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)).relu())
        h = self.middle(h).relu() + h
        return F.dropout(self.last(h), 0.2, self.training) @ self.first.weight.t()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Plain16(Plain):
    """The same with 16 results, as many as Mixed has."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 16)


def seeded(make):
    torch.manual_seed(0)
    return make()


def compiled(model, backend, **options):
    told = {"chunks": 4, "loss_fn": F.mse_loss, "partition": ["last"]} | options
    return fxpipe.compile(model, ["cpu"] * 2, stage_backend=backend, **told)


def trained(backend, how="1f1b", make=Mixed, **options):
    """Two training steps: what comes out, all gradients and all buffers."""
    model = seeded(make)
    x, y = torch.randn(BATCH, 8), torch.randn(BATCH, 16)
    schedule = "gpipe" if how == "pipe(x)" else how
    with compiled(model, backend, schedule=schedule, **options) as pipe:
        found = []
        for _ in range(2):
            if how == "pipe(x)":
                out = pipe(x)
                F.mse_loss(out, y).backward()
            else:
                out = pipe.step(x, target=y)
            found.append(out.detach())
    return found + [p.grad for p in model.parameters()] + list(model.buffers())


class Counting:
    """A backend that compiles nothing, and keeps the graphs that it is given."""

    def __init__(self):
        self.graphs = []
        self.__name__ = "counting"

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm)
        return gm.forward


# ------------------------------------------------------------------------------ what it computes


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("how", ["pipe(x)", "gpipe", "1f1b", "zb_h1"])
def test_with_eager_backends_bits_are_those_of_the_stages_as_they_are(how, checkpoint):
    """Masks of dropout and statistics of batch norms included, also when stages run twice."""
    expected = trained(None, how, checkpoint=checkpoint)
    for backend in ("eager", "aot_eager"):
        found = trained(backend, how, checkpoint=checkpoint)
        assert all(map(torch.equal, found, expected)), backend


class WithContexts(nn.Module):
    """Computes a part without gradients, and a part without autocast, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        first, second, third, last = self.layers
        with torch.no_grad():
            angles = first(x) * 2
        x = second(x) * angles.cos()
        with torch.autocast("cpu", enabled=False):
            x = third(x.float()).sin()
        return last(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_what_export_puts_into_contexts_of_grad_mode_and_autocast_is_compiled(schedule):
    x = torch.randn(8, 8)

    def trained(backend):
        model = seeded(WithContexts)
        options = {"tracer": "export", "schedule": schedule, "partition": "auto"}
        with compiled(model, backend, **options) as pipe:
            value = pipe.step(x, target=x)
            assert contexts_in(pipe) == ["wrap_with_set_grad_enabled", "wrap_with_autocast"]
            assert "runs as it is" not in str(pipe.report())
        return [value, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = trained(None)
    assert len(expected) == 1 + 6, "the first layer has no gradients"
    for backend in ("eager", "aot_eager"):
        assert all(map(torch.equal, trained(backend), expected)), backend


def contexts_in(pipe):
    """The operators of all stages that call a module within a context."""
    nodes = (node for stage in pipe.stages for node in stage.module.graph.nodes)
    names = (getattr(node.target, "__name__", "") for node in nodes)
    return [name for name in names if name.startswith("wrap_with_")]


def test_segments_of_a_stage_are_compiled_one_by_one():
    options = {"checkpoint": "always", "checkpoint_segments": 2}
    backend = Counting()
    found = trained(backend, "1f1b", **options)
    assert all(map(torch.equal, found, trained(None, "1f1b", **options)))
    assert len(backend.graphs) == 4


def test_two_stages_on_a_lane_are_compiled_too():
    options = {"partition": "auto", "chunks": 4}
    found = trained("aot_eager", "zbv", **options)
    assert all(map(torch.equal, found, trained(None, "zbv", **options)))


def test_inductor_gives_the_results_of_the_compiled_model_in_a_loop():
    model = seeded(Plain)
    other = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    with compiled(model, "inductor", schedule="zb_h1", checkpoint="except_last") as pipe:
        loss = pipe.step(x, target=y)
    fast = torch.compile(other)
    losses = []
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        losses.append(F.mse_loss(fast(part), target) / 4)
        losses[-1].backward()
    torch.testing.assert_close(loss, sum(losses).detach())
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode", "autocast"])
def test_stages_are_compiled_for_the_mode_of_the_call(mode):
    model = seeded(Plain)
    x = torch.randn(8, 8)
    expected = copy.deepcopy(model)
    with compiled(model, "aot_eager") as pipe:
        pipe(x)
        contexts = {
            "eval": torch.enable_grad(),
            "no_grad": torch.no_grad(),
            "inference_mode": torch.inference_mode(),
            "autocast": torch.autocast("cpu", torch.bfloat16),
        }
        with contexts[mode]:
            pipe.train(mode != "eval")
            found = pipe(x)
            parts = [expected(part) for part in x.chunk(4)]
    assert torch.equal(found, torch.cat(parts))
    assert found.dtype == parts[0].dtype and found.requires_grad == parts[0].requires_grad
    assert found.is_inference() == parts[0].is_inference()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_casts_of_autocast_are_compiled_into_both_halves(backend):
    def run(backend):
        with torch.autocast("cpu", torch.bfloat16):
            return trained(backend, "zb_h1")

    assert all(map(torch.equal, run(backend), run(None)))


def test_statistics_of_a_deferred_batch_norm_leave_a_compiled_stage():
    found = trained("aot_eager", deferred_batch_norm=True)
    assert all(map(torch.equal, found, trained(None, deferred_batch_norm=True)))


def test_nested_values_travel_between_compiled_stages():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.last = nn.Linear(8, 16)

        def forward(self, x):
            h = x[:, None].expand(-1, 3, -1)
            h, weights = self.attention(h, h, h)
            return self.last(h.mean(1)) + weights.sum((1, 2))[:, None]

    for how in ("pipe(x)", "zb_h1"):
        found = trained("aot_eager", how, make=Attends)
        assert all(map(torch.equal, found, trained(None, how, make=Attends)))


def test_a_weight_that_stages_share_gets_the_gradients_of_all():
    class Tied(Plain):
        def forward(self, x):
            return self.last(self.first(x).relu()) @ self.last.weight @ self.first.weight

    def run(backend):
        model = seeded(Tied)
        with compiled(model, backend) as pipe:
            pipe.step(torch.ones(8, 8), target=torch.zeros(8, 8))
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run("aot_eager"), run(None)))


def test_dropout_draws_the_same_for_the_same_seed():
    model, x = seeded(Mixed), torch.randn(8, 8)
    with compiled(model, "aot_eager") as pipe:
        outputs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outputs.append(pipe(x).detach())
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_backward_may_run_twice(schedule):
    model, x = seeded(Plain), torch.randn(8, 8)
    with compiled(model, "aot_eager", schedule=schedule) as pipe:
        out = pipe(x).sum()
        out.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        out.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


# ------------------------------------------------------------------------ what a backend is given


def test_a_backend_gets_the_graph_of_a_stage_with_its_tensors_as_inputs():
    backend = Counting()
    with compiled(seeded(Plain), backend) as pipe:
        pipe(torch.randn(8, 8))
    codes = [str(gm.graph).strip() for gm in backend.graphs]
    assert codes == [
        "graph():\n"
        "    %first_weight : [num_users=1] = placeholder[target=first_weight]\n"
        "    %first_bias : [num_users=1] = placeholder[target=first_bias]\n"
        "    %x : [num_users=1] = placeholder[target=x]\n"
        "    %first : [num_users=1] = call_function[target=fxpipe.runtime.compiled.lifted.first]"
        "(args = ((%first_weight, %first_bias), %x), kwargs = {})\n"
        "    %relu : [num_users=1] = call_method[target=relu](args = (%first,), kwargs = {})\n"
        "    return (relu,)",
        "graph():\n"
        "    %last_weight : [num_users=1] = placeholder[target=last_weight]\n"
        "    %last_bias : [num_users=1] = placeholder[target=last_bias]\n"
        "    %relu : [num_users=1] = placeholder[target=relu]\n"
        "    %last : [num_users=1] = call_function[target=fxpipe.runtime.compiled.lifted.last]"
        "(args = ((%last_weight, %last_bias), %relu), kwargs = {})\n"
        "    return (last,)",
    ]


def test_other_batch_sizes_take_the_same_code():
    backend = Counting()
    model = seeded(Plain)
    with compiled(model, backend) as pipe:
        for rows in (12, 11, 9, 40):
            x = torch.randn(rows, 8)
            parts = [model(part) for part in torch.tensor_split(x, 4)]
            assert torch.equal(pipe(x), torch.cat(parts))
    assert len(backend.graphs) == 2


class Resized(nn.Module):
    """The operators by which U-Nets change the sizes of images."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)
        self.norm = nn.InstanceNorm2d(4)

    def forward(self, x):
        h = F.max_pool2d(self.norm(self.first(x)), 2)
        return self.last(F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=True))


def test_operators_whose_kernels_look_at_sizes_are_compiled_for_all_of_them():
    """The kernel that puts F.interpolate together asks for the numbers of a tensor's sizes, also
    for that of its rows, where an implementation in Python asks for those that it needs."""
    backend = Counting()
    model = seeded(Resized)
    with compiled(model, backend) as pipe:
        for rows in (12, 11, 9, 40):
            x = torch.randn(rows, 3, 8, 8)
            parts = [model(part) for part in torch.tensor_split(x, 4)]
            assert torch.equal(pipe(x), torch.cat(parts))
    assert len(backend.graphs) == 2


class Normed(nn.Module):
    """A U-Net with two levels, whose instance norms are batch norms of one image with rows times
    channels: the strides of what they save for the backward depend on the number of rows."""

    def __init__(self):
        super().__init__()
        self.down, self.last = self.cell(3, 8), self.cell(16, 3)
        self.bottom = self.cell(8, 8)

    @staticmethod
    def cell(inner, outer):
        conv = nn.Conv2d(inner, outer, 3, padding=1)
        return nn.Sequential(conv, nn.InstanceNorm2d(outer), nn.LeakyReLU())

    def forward(self, x):
        skip = self.down(x)
        h = F.interpolate(self.bottom(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.last(torch.cat([h, skip], 1))


def test_inductor_compiles_the_backward_of_a_unet_for_all_batch_sizes():
    inductor, graphs = StageBackend("inductor"), []

    def backend(gm, inputs):
        graphs.append(gm)
        return inductor(gm, inputs)

    model = seeded(Normed)
    with compiled(model, backend) as pipe:
        for rows in (12, 11, 9):
            x, y = torch.randn(rows, 3, 8, 8), torch.randn(rows, 3, 8, 8)
            found = pipe.step(x, target=y)
            parts = zip(torch.tensor_split(x, 4), torch.tensor_split(y, 4), strict=True)
            losses = [F.mse_loss(model(one), other) * len(one) / rows for one, other in parts]
            torch.testing.assert_close(found, sum(losses).detach())
    assert len(graphs) == 2


def test_sizes_of_aot_graphs_are_symbols():
    model = seeded(Mixed)
    seen = []

    def backend(gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(gm, inputs):
            seen.append(gm)
            return gm.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(gm, inputs)

    with compiled(model, backend) as pipe:
        for rows in (12, 11, 9, 40):
            pipe(torch.randn(rows, 8)).sum().backward()
    assert len(seen) == 4  # forward and backward of each stage
    assert any("sym_size" in gm.code for gm in seen)


def test_random_numbers_are_drawn_by_an_operator_with_a_seed():
    seen = []

    def backend(gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(gm, inputs):
            seen.append(gm)
            return gm.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(gm, inputs)

    with compiled(seeded(Mixed), backend) as pipe:
        pipe(torch.randn(12, 8))
    drawn = [n for gm in seen for n in gm.graph.nodes if "fxpipe.draw" in str(n.target)]
    assert [n.args[1] for n in drawn] == [0, 1]
    assert all(n.args[0].op == "placeholder" for n in drawn)


def test_it_is_compiled_anew_for_other_dtypes_modes_and_attributes():
    backend = Counting()
    model = seeded(Mixed)
    with compiled(model, backend) as pipe:

        def compiles(call):
            before = len(backend.graphs)
            call()
            return len(backend.graphs) - before

        x = torch.randn(12, 8)
        assert compiles(lambda: pipe(x)) == 2
        assert compiles(lambda: pipe(x)) == 0
        with torch.no_grad():
            assert compiles(lambda: pipe(x)) == 2
        model.first.requires_grad_(False)
        assert compiles(lambda: pipe(x)) == 2
        model.norm.eps = 0.5
        assert compiles(lambda: pipe(x)) >= 1


def test_a_parameter_that_is_assigned_anew_is_taken():
    model = seeded(Plain)
    x = torch.randn(8, 8)
    with compiled(model, "aot_eager") as pipe:
        pipe(x)
        model.first.weight = nn.Parameter(torch.ones(16, 8))
        found = pipe(x)
        assert torch.equal(found, torch.cat([model(part) for part in x.chunk(4)]))
        found.sum().backward()
    assert model.first.weight.grad is not None


def test_an_attribute_of_a_module_counts_that_has_changed():
    model = seeded(Mixed)
    x = torch.randn(8, 8)
    with compiled(model, "aot_eager") as pipe, torch.no_grad():
        pipe(x)
        model.norm.eps = 3.0
        torch.manual_seed(3)
        found = pipe(x)
    with compiled(copy.deepcopy(model), None) as other, torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(found, other(x))


def test_a_mode_is_handed_to_inductor_which_has_graphs_of_devices_on_devices_only(monkeypatch):
    """On the CPU "reduce-overhead" changes nothing: the bits are those of inductor without it."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    compiling, asked = compile_fx.compile_fx, []

    def noting(*args, config_patches=None, **kwargs):
        asked.extend([config_patches] if config_patches else [])  # it calls itself without any
        return compiling(*args, config_patches=config_patches, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", noting)
    plain = trained("inductor", "gpipe", make=Plain16)
    assert asked == []
    found = trained({"backend": "inductor", "mode": "reduce-overhead"}, "gpipe", make=Plain16)
    assert [patches["triton.cudagraphs"] for patches in asked] == [True] * 2  # of two stages
    assert all(map(torch.equal, found, plain))


# ------------------------------------------------------------------------------- what is refused


def refuse(gm, example_inputs):
    raise RuntimeError("there is no such kernel")


def test_a_stage_that_cannot_be_compiled_runs_as_it_is_and_is_named():
    model, x = seeded(Plain), torch.randn(8, 8)
    with compiled(model, refuse) as pipe:
        with pytest.warns(UserWarning) as said:
            found = pipe(x)
        assert torch.equal(found, torch.cat([model(part) for part in x.chunk(4)]))
        texts = sorted(str(each.message) for each in said)
        assert texts == [
            f"stage_{i} is not compiled by refuse, and runs as it is: RuntimeError: there is no "
            "such kernel"
            for i in range(2)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(x)  # which is said once
        assert "stage_1 runs as it is: RuntimeError: there is no such kernel" in str(pipe.report())


def test_a_stage_whose_backward_cannot_be_compiled_runs_as_it_is_from_the_start():
    def backend(gm, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def forward(gm, inputs):
            return make_boxed_func(gm.forward)

        return aot_autograd(fw_compiler=forward, bw_compiler=refuse)(gm, inputs)

    x, y = torch.randn(8, 8), torch.zeros(8, 4)

    def run(backend):
        model = seeded(Plain)
        with compiled(model, backend) as pipe:
            pipe.step(x, target=y)
        return [p.grad for p in model.parameters()]

    with pytest.warns(UserWarning, match="is not compiled by backend.*no such kernel"):
        found = run(backend)
    assert all(map(torch.equal, found, run(None)))


def test_a_stage_that_needs_values_runs_as_it_is():
    class Gate(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x * 3

    class Needs(Plain):
        def __init__(self):
            super().__init__()
            self.gate = Gate()

        def forward(self, x):
            return self.last(self.gate(self.first(x)))

    model, x = seeded(Needs), torch.randn(8, 8)
    with compiled(model, "aot_eager", check=False) as pipe:
        with pytest.warns(UserWarning, match="stage_0 is not compiled by aot_eager"):
            found = pipe(x)
        assert torch.equal(found, torch.cat([model(part) for part in x.chunk(4)]))


@pytest.mark.parametrize("error", [KeyError("a bug"), torch.OutOfMemoryError("no room")])
def test_a_bug_of_ours_is_no_reason_to_run_a_stage_as_it_is(monkeypatch, error):
    """A warning would hide it, and so it would a lack of memory, in runs that are merely slower."""

    def fail(*_):
        raise error

    fail.__code__ = fail.__code__.replace(co_filename=compiled_stage.__file__)
    monkeypatch.setattr(compiled_stage, "Lifted", fail)
    with compiled(seeded(Plain), "eager") as pipe, pytest.raises(type(error)):
        pipe(torch.randn(8, 8))


def test_hooks_that_are_added_later_are_called():
    model, x = seeded(Plain), torch.randn(8, 8)
    with compiled(model, "aot_eager") as pipe:
        pipe(x)
        calls = []
        model.last.register_forward_hook(lambda *given: calls.append(given))
        with pytest.warns(UserWarning, match="runs as it is: last has hooks"):
            pipe(x)
    assert len(calls) == 4


def test_a_model_with_checkpoints_of_its_own_runs_as_it_is():
    class Own(Plain):
        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    x = torch.randn(8, 8, requires_grad=True)

    def run(backend):
        model = seeded(Own)
        with compiled(model, backend) as pipe:
            pipe(x).sum().backward()
        return [p.grad for p in model.parameters()]

    with pytest.warns(UserWarning, match="the model checkpoints .* itself"):
        found = run("aot_eager")
    assert all(map(torch.equal, found, run(None)))


def test_an_error_in_compiled_code_names_the_stage():
    def fails(gm, example_inputs):
        def run(*args):
            raise ValueError("in the kernel")

        return run

    pipe = compiled(seeded(Plain), fails)
    with pytest.raises(ValueError, match="in the kernel") as caught:
        pipe(torch.randn(8, 8))
    pipe.close()
    assert any("in fxpipe: stage 0, micro-batch 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("indutor", ValueError, "'indutor', which torch.compile does not take: .*'inductor'"),
        (3, TypeError, "stage_backend is a int: give the name of a backend"),
        ({"backend": "eager", "fullgraph": True}, ValueError, "has the key 'fullgraph'"),
        ({"mode": "fast"}, ValueError, "which torch.compile does not take"),
        ({"mode": "default", "options": {}}, ValueError, "both mode and options"),
    ],
)
def test_what_torch_compile_does_not_take_is_refused_at_once(given, error, said):
    with pytest.raises(error, match=said):
        fxpipe.compile(Plain(), ["cpu"] * 2, stage_backend=given)


@pytest.mark.parametrize(
    "given", ["eager", {"backend": "inductor", "mode": "reduce-overhead"}, {"dynamic": False}]
)
def test_a_backend_is_given_as_torch_compile_takes_it(given):
    assert isinstance(StageBackend(given), StageBackend)


# --------------------------------------------------------------------------------- how it is shown


def test_reports_say_what_compiles_the_stages():
    model = seeded(Plain)
    with compiled(model, {"backend": "eager"}, example_inputs=(torch.randn(8, 8),)) as pipe:
        assert "stages are compiled by eager, each when it is first called" in str(pipe.report())
        assert "stage_backend=eager" in repr(pipe)
        assert "stage_0_mb0 = self.stage_0(x_s0_mb0)" in pipe.code
        assert pipe.state_dict().keys() == model.state_dict().keys()


def test_a_pipeline_with_a_backend_can_be_pickled():
    x = torch.randn(8, 8)
    with compiled(seeded(Plain), "aot_eager") as pipe:
        expected = pipe(x)
        with pickle.loads(pickle.dumps(pipe)) as again:
            assert torch.equal(again(x), expected)
            assert "stages are compiled by aot_eager" in str(again.report())
