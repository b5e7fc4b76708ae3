"""The cache on disk: a second process takes from a folder what the first has traced and checked;
what is stale is compiled anew."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.compiler.disk import key, versions
from fxpipe.compiler.disk.errors import CacheWarning
from fxpipe.compiler.disk.slot import READ, WRITTEN
from fxpipe.runtime.checkpointing.regions import Region
from fxpipe.trace.containers import Unchanging

TWO = ["cpu", "cpu"]

SOURCE = """
import torch
from torch import nn

SCALE = 2.0

def scaled(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self, factor=3.0, width=6):
        super().__init__()
        self.factor, self.unread = factor, object()
        self.a, self.b, self.c = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mask", torch.tensor([True] * width))

    def forward(self, x):
        y = self.drop(torch.relu(self.a(x))) * self.factor
        return {"y": self.c(scaled(self.b(y * self.mask))), "n": x.shape[-1]}
"""


def module_of(source, folder):
    """The module ``net`` as it is imported from a file that has this source by now."""
    path = folder / "net.py"
    path.write_text(textwrap.dedent(source))
    made = sys.modules["net"] = types.ModuleType("net")
    made.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(made))
    return made


@pytest.fixture
def net(tmp_path):
    yield module_of(SOURCE, tmp_path)
    sys.modules.pop("net", None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


X = torch.arange(32.0).view(8, 4).sin()


def compiled(model, folder, *inputs, **options):
    """How the cache has served the compilation of a model for a call."""
    options = {"chunks": 4, **options}
    with fxpipe.compile(model, TWO, cache=folder, **options) as pipe:
        pipe.prepare(*(inputs or (X,)))
        return pipe.compilations[-1].cache


PROCESS = """
import sys, torch, fxpipe
sys.path.insert(0, sys.argv[1])
from net import Net
torch.set_num_threads(1)
x, found = torch.arange(32.0).view(8, 4).sin(), []
for tracer in "symbolic", "export":
    torch.manual_seed(0)
    model = Net()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, tracer=tracer, cache=sys.argv[2] or None)
    for mode in True, False:
        model.train(mode)
        torch.manual_seed(1)
        output = pipe(x)
        output["y"].square().sum().backward()
        found += [output["y"].detach(), output["n"]]
    found += [p.grad for p in model.parameters()]
    longer = pipe(x[:6])
    found += [longer["y"].detach()]
    print(tracer, [each.cache for each in pipe.compilations])
    pipe.close()
torch.save(found, sys.argv[3])
"""


def test_a_second_process_takes_the_first_ones_compilations_and_gets_the_same_bits(
    net, folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "main.py").write_text(PROCESS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["main.py", str(tmp_path), "", str(tmp_path / "0.pt")])
    exec(compile(PROCESS, "main.py", "exec"), {"__name__": "__main__"})  # without a cache: here
    said, found = [capsys.readouterr().out.splitlines()], [torch.load(tmp_path / "0.pt")]
    for i, cache in enumerate((folder, folder), 1):
        command = [sys.executable, tmp_path / "main.py", tmp_path, cache, tmp_path / f"{i}.pt"]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        said.append(run.stdout.splitlines())
        found.append(torch.load(tmp_path / f"{i}.pt"))
    assert said == [
        ["symbolic ['', '']", "export ['', '']"],
        [f"symbolic {[WRITTEN] * 2}", f"export {[WRITTEN] * 2}"],
        [f"symbolic {[READ] * 2}", f"export {[READ] * 2}"],
    ]
    without, *with_cache = found
    for each in with_cache:
        for one, other in zip(without, each, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_the_model_is_neither_traced_nor_checked_again(net, folder, monkeypatch):
    assert compiled(net.Net(), folder) == WRITTEN

    def fail(*args, **kwargs):
        raise AssertionError("it is in the cache")

    monkeypatch.setattr("fxpipe.compiler.staging.trace", fail)
    monkeypatch.setattr("fxpipe.compiler.driver.meaning_of", fail)
    assert compiled(net.Net(), folder) == READ


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("training", [True, False])
def test_what_comes_from_the_cache_computes_the_models_bits(net, folder, tracer, training):
    compiled(net.Net().train(training), folder, tracer=tracer)
    model = net.Net(factor=3.0).train(training)
    model.drop.p = 0.0
    with fxpipe.compile(model, TWO, chunks=4, tracer=tracer, cache=folder) as pipe:
        pipe(X)
        assert pipe.compilations[-1].cache == WRITTEN  # another probability
    model.drop.p = 0.5
    loop = []
    with fxpipe.compile(model.eval(), TWO, chunks=4, tracer=tracer, cache=folder) as pipe:
        output = pipe(X)
        output["y"].sum().backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loop = [model(part) for part in X.chunk(4)]
        for part in reversed(loop):
            part["y"].sum().backward()
    assert torch.equal(output["y"], torch.cat([part["y"] for part in loop]))
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


# ----------------------------------------------------------------------------------- what is stale


@pytest.mark.parametrize(
    "old, new",
    [
        ("torch.relu(", "torch.tanh("),
        ("return x * SCALE", "return x + SCALE"),
        ("SCALE = 2.0", "SCALE = 4.0"),
        ('"n": x.shape[-1]', '"m": x.shape[-1]'),
        ("Dropout(0.5)", "Dropout(0.25)"),
    ],
    ids=["the forward", "a function that it calls", "a global name", "an output", "a submodule"],
)
def test_a_model_whose_source_has_changed_is_compiled_anew(net, folder, tmp_path, old, new):
    assert compiled(net.Net(), folder) == WRITTEN
    assert old in SOURCE
    changed = module_of(SOURCE.replace(old, new), tmp_path)
    assert compiled(changed.Net(), folder) == WRITTEN
    assert compiled(changed.Net(), folder) == READ
    assert compiled(module_of(SOURCE, tmp_path).Net(), folder) == READ


def test_what_runs_counts_and_not_what_its_file_says_by_now(net, folder, tmp_path):
    assert compiled(net.Net(), folder) == WRITTEN
    net.scaled = lambda x: x - 1
    assert compiled(net.Net(), folder) == WRITTEN
    (tmp_path / "net.py").write_text("")
    assert compiled(net.Net(), folder) == READ


def test_a_forward_that_one_module_has_been_given_counts(net, folder):
    assert compiled(net.Net(), folder) == WRITTEN
    model = net.Net()
    model.b.forward = lambda x: x * 2
    assert compiled(model, folder) == WRITTEN
    other = net.Net()
    other.b.forward = lambda x: x * 3
    assert compiled(other, folder) == WRITTEN


def test_code_in_another_file_counts(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = """
        from torch import nn
        import other_file

        class Net(nn.Sequential):
            def forward(self, x):
                from other_file import within
                return within(other_file.helped(super().forward(x)))
    """
    states = []
    for text in "x + 1", "x + 1", "x + 2":
        (tmp_path / "other_file.py").write_text(
            f"def helped(x):\n    return {text}\n\ndef within(x):\n    return {text}\n"
        )
        sys.modules.pop("other_file", None)
        importlib.invalidate_caches()
        made = module_of(source, tmp_path)
        states.append(compiled(made.Net(nn.Linear(4, 4), nn.Linear(4, 4)), folder))
    assert states == [WRITTEN, READ, WRITTEN]


def test_a_function_of_the_users_that_is_a_node_of_the_graph_is_found_again(folder, tmp_path):
    source = """
        import torch
        from torch import fx, nn

        @fx.wrap
        def plus(x, number):
            return x - number

        class Net(nn.Sequential):
            def forward(self, x):
                return plus(super().forward(x), 1)
    """
    states = []
    for number in "number", "number", "2 * number":
        made = module_of(source.replace("x - number", f"x - {number}"), tmp_path)
        model = made.Net(nn.Linear(4, 4), nn.Linear(4, 4))
        states.append(compiled(model, folder, tracer="symbolic"))
    assert states == [WRITTEN, READ, WRITTEN]


def test_a_module_that_is_no_part_of_the_model_counts_with_all_that_it_has(folder, tmp_path):
    source = """
        from torch import nn

        class Beside(nn.Linear):
            number = 1

            def forward(self, x):
                return super().forward(x) * self.number

        beside = Beside(4, 4).requires_grad_(False)

        class Net(nn.Sequential):
            def forward(self, x):
                return super().forward(x) * beside.number
    """
    made = module_of(source, tmp_path)
    states = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: setattr(made.beside, "number", 3),
        lambda: made.beside.weight.mul_(2),
    ):
        change()
        states.append(compiled(made.Net(nn.Linear(4, 4), nn.Linear(4, 4)), folder))
    assert states == [WRITTEN, READ, WRITTEN, WRITTEN]


def test_an_attribute_counts_if_the_forward_reads_it(net, folder):
    assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(factor=4.0), folder) == WRITTEN
    model = net.Net()
    model.unread, model.new = "something else", 3
    assert compiled(model, folder) == READ
    model.drop.p = 0.25
    assert compiled(model, folder) == WRITTEN
    assert compiled(net.Net(factor=4.0), folder) == READ


def test_shapes_and_kinds_of_parameters_and_buffers_count_and_their_values_do_not(net, folder):
    assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(width=8), folder) == WRITTEN
    assert compiled(net.Net().double(), folder, X.double()) == WRITTEN
    frozen, tied, masked = net.Net(), net.Net(), net.Net()
    frozen.a.bias.requires_grad_(False)
    assert compiled(frozen, folder) == WRITTEN
    tied.b.bias = tied.a.bias
    assert compiled(tied, folder) == WRITTEN
    masked.mask[0] = False  # by a flag a forward may decide
    assert compiled(masked, folder) == WRITTEN
    with torch.no_grad():
        trained = net.Net()
        for parameter in trained.parameters():
            parameter.mul_(3)
    assert compiled(trained, folder) == READ


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 2},
        {"check": False},
        {"in_dims": 0},
        {"tracer": "export"},
        {"loss_fn": nn.functional.mse_loss},
        {"dynamic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_count(net, folder, options):
    assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(), folder, **options) == WRITTEN
    assert compiled(net.Net(), folder, **options) == READ


def test_versions_count(net, folder, monkeypatch):
    assert compiled(net.Net(), folder) == WRITTEN
    monkeypatch.setattr(key, "versions", lambda: (*versions.versions()[:-1], "another fxpipe"))
    assert compiled(net.Net(), folder) == WRITTEN


def test_the_call_counts_and_the_settings_of_pytorch_and_the_mode(net, folder):
    assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(), folder, torch.zeros(8, 4)) == READ
    assert compiled(net.Net(), folder, X[:6]) == WRITTEN
    assert compiled(net.Net(), folder, X.t().contiguous().t()) == WRITTEN
    assert compiled(net.Net().eval(), folder) == WRITTEN
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(net.Net(), folder) == WRITTEN
    torch.use_deterministic_algorithms(True)
    try:
        assert compiled(net.Net(), folder) == WRITTEN
    finally:
        torch.use_deterministic_algorithms(False)
    model = net.Net()
    model.a.register_forward_hook(lambda module, args, output: None)
    assert compiled(model, folder) == WRITTEN


# --------------------------------------------------------------------------------- files, warnings


def only_file(folder):
    (file,) = folder.rglob("*.json")
    return file


def written(file, data):
    """Write a file of the cache as a process would that has such data."""
    rest = json.dumps(data).encode()
    file.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def content(file):
    return json.loads(file.read_bytes().partition(b"\n")[2])


def swap(data, old, new):
    return json.loads(json.dumps(data).replace(old, new))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"relu", b"tanh"),
    ],
    ids=["cut off", "empty", "changed"],
)
def test_a_damaged_file_is_warned_of_and_written_again(net, folder, damage):
    compiled(net.Net(), folder)
    file = only_file(folder)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(CacheWarning, match="it is damaged.* compiled anew"):
        assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(), folder) == READ


@pytest.mark.parametrize(
    "change",
    [
        lambda data: {key: data[key] for key in ("state", "attributes")},
        lambda data: [],
        lambda data: {**data, "attributes": [["nowhere", "x"]]},
        lambda data: swap(data, '"mask"', '"masks"'),
        lambda data: swap(data, '"in_dims": [0]', '"in_dims": [7]'),
    ],
    ids=["without a graph", "a list", "an unknown module", "an unknown buffer", "a dimension"],
)
def test_a_file_that_says_what_the_model_does_not_have_is_not_used(net, folder, change):
    compiled(net.Net(), folder)
    file = only_file(folder)
    written(file, change(content(file)))
    with pytest.warns(CacheWarning, match="compiled anew"):
        assert compiled(net.Net(), folder) == WRITTEN
    assert compiled(net.Net(), folder) == READ


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_graph_that_computes_something_else_is_noticed_in_a_run_beside_the_model(
    net, folder, tracer
):
    compiled(net.Net(), folder, tracer=tracer)
    file = only_file(folder)
    written(file, swap(content(file), "3.0", "4.0"))
    with pytest.warns(CacheWarning, match="its graph differs on the example: output"):
        assert compiled(net.Net(), folder, tracer=tracer) == WRITTEN


@pytest.mark.parametrize(
    "old, new",
    [
        ('["function", "torch.relu"]', '["function", "os.system"]'),
        ('["function", "torch.relu"]', '["function", "builtins.eval"]'),
        ('["function", "torch.relu"]', '["function", "torch.load"]'),
        ('["function", "torch.relu"]', '["own", "os:system"]'),
        ('["function", "torch.relu"]', '["own", "net:scaled"]'),  # it has not been wrapped
        ('["function", "torch.relu"]', '["op", "aten", "from_file", "default"]'),
        ('["function", "torch.relu"]', '["op", "os", "system", "default"]'),
        ('"call_function"', '"call_method"'),
        ('"get_attr", "mask", "mask"', '"get_attr", "mask", "__class__"'),
    ],
)
def test_a_hostile_file_runs_nothing(net, folder, tmp_path, monkeypatch, old, new):
    compiled(net.Net(), folder)
    file = only_file(folder)
    changed = swap(content(file), old, new)
    assert changed != content(file)
    written(file, changed)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it has run"))
    with pytest.warns(CacheWarning, match="compiled anew"):
        assert compiled(net.Net(), folder) == WRITTEN


def test_a_folder_that_cannot_be_written_to_is_warned_of(net, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="nothing can be written to"):
        assert compiled(net.Net(), tmp_path / "file") == ""


def test_no_other_files_are_left_in_the_folder(net, folder):
    compiled(net.Net(), folder)
    file = only_file(folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == [file]


def test_the_environment_can_name_the_folder(net, folder, monkeypatch):
    monkeypatch.setenv("FXPIPE_CACHE", str(folder))
    assert compiled(net.Net(), None) == WRITTEN
    assert compiled(net.Net(), None) == READ
    monkeypatch.setenv("FXPIPE_CACHE", "")
    assert compiled(net.Net(), None) == ""


class Summed(nn.Module):
    """A model with an output that its micro-batches change, of which the check warns."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        return y, (y.detach() > y.detach().mean()).float().var()


def test_warnings_are_given_again_from_the_cache(folder):
    said = []
    for state in WRITTEN, READ:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert compiled(Summed(), folder, check="warn") == state
        said.append([(str(each.message), each.category) for each in caught])
    assert said[0] and said[0] == said[1]


def test_a_warning_from_the_cache_is_for_the_line_that_reads_it_and_not_for_the_one_that_wrote_it(
    folder,
):
    calls = (
        lambda pipe: pipe(X),
        lambda pipe: pipe(X),
    )
    places = []
    for call, state in zip(calls, (WRITTEN, READ), strict=True):
        with (
            pytest.warns(fxpipe.BatchWarning) as given,
            fxpipe.compile(Summed(), TWO, chunks=2, check="warn", cache=folder) as pipe,
        ):
            call(pipe)
            assert pipe.compilations[-1].cache == state
        places.append([(each.filename, each.lineno) for each in given])
    ((written, first),), ((read, second),) = places
    assert written == read == __file__ and second == first + 1


class Countless(nn.Module):
    """A model whose forward reads an object of which no digest can be made."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.source = nn.Linear(4, 4), nn.Linear(4, 4), torch.Generator()

    def forward(self, x):
        return self.b(self.a(x)) * (1 if self.source is not None else 2)


def test_a_model_that_depends_on_what_has_no_digest_is_not_kept_and_says_so(folder):
    state = compiled(Countless(), folder)
    assert "not kept in the cache: source is a torch._C.Generator" in state
    assert not list(folder.rglob("*.json"))


def test_a_tracer_of_ones_own_is_not_kept(net, folder):
    def tracer(model, args, kwargs):
        return torch.fx.symbolic_trace(model)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "a tracer of the user's own" in compiled(model, folder, tracer=tracer)


def test_a_model_on_meta_is_kept_too(folder):
    states = []
    for _ in range(2):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        states.append(compiled(model, folder, tracer="export"))
    assert states == [WRITTEN, READ]


def test_other_sizes_are_kept_with_their_conditions(folder):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, ids):
            assert ids.shape[1] <= 16
            return self.b(self.a(ids))

    ids = torch.arange(96).view(8, 12) % 10
    said = []
    for state in WRITTEN, READ:
        with fxpipe.compile(
            Cut(), TWO, chunks=4, dynamic=True, tracer="export", cache=folder
        ) as pipe:
            pipe.prepare(ids)
            assert pipe.compilations[0].cache == state
            pipe(ids[:, :5])
            assert len(pipe.compilations) == 1
            said.append(str(pipe.guards))
            assert "ids.size(1)" in pipe.guards.failure(torch.zeros(8, 17, dtype=torch.int64))
    assert said[0] == said[1]


def test_the_record_of_compilations_says_where_each_came_from(net, folder):
    for state in WRITTEN, READ:
        with fxpipe.compile(net.Net(), TWO, chunks=4, cache=folder) as pipe:
            pipe(X)
            assert f"symbolic, {state}: the first call" in str(pipe.compilations)


def test_a_number_that_the_model_sets_is_set_from_the_cache_too(folder):
    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.window = nn.Linear(1, 4), nn.Linear(4, 1), 8

        def forward(self, x):
            if x.shape[1] <= self.window:
                self.window = x.shape[1]
            y = self.b(self.a(x[..., None]))[..., 0]
            return y[:, : self.window].sum(1)

    for state in WRITTEN, READ:
        model = Windowed()
        with fxpipe.compile(model, TWO, chunks=4, tracer="export", cache=folder) as pipe:
            pipe(torch.ones(8, 4))
            assert pipe.compilations[0].cache == state
            assert model.window == 4


def test_files_of_the_cache_are_text_without_code(net, folder):
    compiled(net.Net(), folder)
    data = content(only_file(folder))
    assert data["traced"]["graph"]["nodes"][0][:2] == ["placeholder", "x"]
    assert Path(only_file(folder)).suffix == ".json"


class Checkpointed(nn.Module):
    """A model with checkpoints of its own, around dropout."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.reentrant = reentrant

    def layer(self, layer, x):
        return nn.functional.dropout(torch.relu(layer(x)), 0.25, self.training)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.layer, layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_checkpoints_of_the_models_own_are_kept(folder, tracer):
    steps = []
    for state in WRITTEN, READ:
        torch.manual_seed(0)
        model = Checkpointed()
        with fxpipe.compile(model, TWO, chunks=4, tracer=tracer, cache=folder) as pipe:
            torch.manual_seed(1)
            output = pipe(X)
            output.square().sum().backward()
            assert pipe.compilations[0].cache == state
            regions = [m for m in pipe.model_graph.modules() if isinstance(m, Region)]
            assert len(regions) == 4
        steps.append([output, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


class Held(nn.Module):
    """A model with a part that stays one node, as it has hooks, and is given a list."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), Second(), nn.Linear(4, 4)
        self.b.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b([x, y]))


class Second(nn.Module):
    def forward(self, parts):
        return parts[1]


def test_a_module_that_is_given_a_list_is_watched_from_the_cache_too(folder):
    outputs = []
    for state in WRITTEN, READ:
        torch.manual_seed(0)
        with fxpipe.compile(Held(), TWO, chunks=4, tracer="symbolic", cache=folder) as pipe:
            outputs.append(pipe(X))
            assert pipe.compilations[0].cache == state
            assert isinstance(pipe.model_graph.b, Unchanging)
    assert torch.equal(*outputs)


def test_parts_without_gradients_and_constants_are_kept(folder):
    class Parted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                y = self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
            return self.b(y) + self.a(x)

    steps = []
    for state in WRITTEN, READ:
        torch.manual_seed(0)
        model = Parted()
        with fxpipe.compile(model, TWO, chunks=4, tracer="export", cache=folder) as pipe:
            output = pipe(X)
            output.square().sum().backward()
            assert pipe.compilations[0].cache == state
        steps.append([output, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
