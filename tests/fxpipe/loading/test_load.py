"""A model that was built on "meta" is compiled there, and loaded stage by stage."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxpipe

LANES = ["cpu", "cpu"]

ROWS, WIDTH = 6, 5


class Net(nn.Module):
    """Two layers, and a buffer that is saved."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


class Rotary(nn.Module):
    """A buffer that is not saved, with the means to make it again, as Hugging Face's have it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", self.made(), persistent=False)
        self.original = self.frequencies  # the same tensor, as a plain attribute

    def made(self):
        return torch.arange(float(WIDTH)) + 1

    def forward(self, x):
        return x * self.frequencies + self.original


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary()
        self.last = nn.Linear(WIDTH, WIDTH)

    def _init_weights(self, module):
        if isinstance(module, Rotary):
            with torch.device("cpu"):
                module.frequencies.copy_(module.made())

    def forward(self, x):
        return self.last(self.rotary(self.first(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def inputs():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def on_meta(kind=Net):
    with torch.device("meta"):
        return kind()


def compiled(model, x=None, lanes=LANES, **options):
    x = inputs() if x is None else x
    return fxpipe.compile(model, lanes, chunks=2, example_inputs=(x,), **options)


def loop(model, x):
    return torch.cat([model(part) for part in x.chunk(2)])


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_model_on_meta_is_cut_and_stays_there_until_it_is_loaded(where):
    model = on_meta()
    pipe = compiled(model, torch.randn(ROWS, WIDTH, device=where))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(pipe.stages) == 2
    assert sum(stage.cost.param_bytes for stage in pipe.stages) > 0
    assert 'not checked: on the device "meta" nothing has values' in pipe.report()


def test_a_call_before_that_is_refused_with_the_line_to_write():
    pipe = compiled(on_meta(), loss_fn=nn.functional.mse_loss)
    message = r"Net is on the device \"meta\".* \(first.weight and 8 other tensors\).*pipe.load\("
    with pytest.raises(RuntimeError, match=message):
        pipe(inputs())
    with pytest.raises(RuntimeError, match=message):
        pipe.step(inputs(), target=inputs())


def test_loaded_it_computes_and_trains_as_the_model_does(tmp_path):
    real = Net()
    save_file(values(real), tmp_path / "model.safetensors")
    model = on_meta()
    pipe = compiled(model)
    result = pipe.load(tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x = inputs()
    found, expected = pipe(x), loop(real, x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert all(
        torch.equal(one.grad, other.grad)
        for one, other in zip(model.parameters(), real.parameters(), strict=True)
    )
    assert torch.equal(model.norm.running_mean, real.norm.running_mean)


def test_what_it_means_is_checked_at_the_first_call_that_has_values():
    class Mixing(Net):
        def forward(self, x):
            return super().forward(x) + x.flip(0)

    pipe = compiled(on_meta(Mixing))
    pipe.load(values(Mixing()))
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"):
        pipe(inputs())


def test_with_nothing_to_check_it_runs_as_it_was_compiled_on_meta():
    real, model = Net(), on_meta()
    pipe = compiled(model, check=False, loss_fn=nn.functional.mse_loss)
    graph = pipe.stage_graph
    pipe.load(values(real))
    x = inputs()
    assert torch.equal(pipe(x), loop(real, x))
    assert pipe.stage_graph is graph
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe.step(x, target=x, optimizer=optimizer)
    assert not torch.equal(model.first.weight, real.first.weight)


def test_what_a_trace_on_meta_could_not_know_is_traced_again_nevertheless():
    class Counting(Net):
        def forward(self, x):
            # No proxy is asked, so that a tensor is made while this is traced, like one on "meta".
            steps = torch.ones_like(next(self.parameters())[0]).cumsum(0)
            return super().forward(x) * steps

    real = Counting()
    pipe = compiled(on_meta(Counting), check=False)
    graph = pipe.stage_graph
    pipe.load(values(real))
    assert torch.equal(pipe(inputs()), loop(real, inputs()))
    assert pipe.stage_graph is not graph


class OnItsDevice(Net):
    """Asks for the device of its parameters, and computes in another way on each kind of them."""

    def forward(self, x):
        device = next(self.parameters()).device
        ways = {"cpu": 2.0, "meta": 3.0}
        return super().forward(x) * torch.arange(WIDTH, device=device) * ways[device.type]


class OnADeviceThatIsKept(Net):
    """Remembers the device that its parameters were made on."""

    def __init__(self):
        super().__init__()
        self.device = self.first.weight.device

    def forward(self, x):
        y = super().forward(x)
        return y + torch.arange(WIDTH, device=self.device) + torch.ones(WIDTH, device=x.device)


@pytest.mark.parametrize(
    "kind, tracer",
    [(OnItsDevice, "symbolic"), (OnItsDevice, "export"), (OnADeviceThatIsKept, "export")],
)
def test_what_was_traced_on_meta_is_what_the_model_does_on_the_cpu(kind, tracer):
    real = kind()
    pipe = compiled(on_meta(kind), check=False, tracer=tracer)
    graph = pipe.stage_graph
    pipe.load(values(real))
    assert torch.equal(pipe(inputs()), loop(real, inputs()))
    assert pipe.stage_graph is graph


def test_it_is_cut_as_it_was_on_meta_so_that_nothing_moves():
    model = on_meta()
    pipe = compiled(model, partition=["last"])
    pipe.load(values(Net()))
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    pipe(inputs())
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert [len(list(stage.module.parameters())) for stage in pipe.stages] == [4, 2]


def test_each_stage_gets_its_parameters_on_its_own_device():
    model = on_meta()
    pipe = compiled(model, partition=["last"], lanes=["cpu", "cpu:0"])
    devices = {"first.weight": torch.device("cpu"), "last.weight": torch.device("cpu:0")}
    homes = pipe._runner.compiler.homes
    assert {name: homes[name] for name in devices} == devices


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_made_before_trains_the_parameters(kind):
    model, real = on_meta(), Net()
    optimizer, reference = kind(model.parameters(), lr=0.1), kind(real.parameters(), lr=0.1)
    pipe = compiled(model, loss_fn=nn.functional.mse_loss)
    parameters = list(model.parameters())
    pipe.load(values(real))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    x, y = inputs(), inputs().flip(0)
    for _ in range(2):
        pipe.step(x, target=y, optimizer=optimizer)
        optimizer.zero_grad()
        losses = [
            nn.functional.mse_loss(real(a), b) / 2
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
        ]
        for loss in reversed(losses):
            loss.backward()
        reference.step()
        reference.zero_grad()
    for one, other in zip(model.parameters(), real.parameters(), strict=True):
        assert torch.equal(one, other)


def test_hooks_and_attributes_of_parameters_remain():
    model, seen = on_meta(), []
    weight = model.first.weight
    weight.kind = "input"
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    pipe = compiled(model)
    pipe.load(values(Net()))
    pipe(inputs()).sum().backward()
    assert model.first.weight is weight and weight.kind == "input"
    assert seen == ["gradient", "accumulated"]


def test_a_frozen_parameter_remains_frozen():
    model = on_meta()
    model.first.requires_grad_(False)
    pipe = compiled(model)
    pipe.load(values(Net()))
    assert [p.requires_grad for p in model.first.parameters()] == [False, False]
    assert model.last.weight.requires_grad


# ------------------------------------------------------------------------- what does not fit


def test_missing_unexpected_and_other_shapes_are_said_as_load_state_dict_says_them():
    state = values(Net())
    del state["last.bias"]
    state |= {"other": torch.ones(1), "first.weight": torch.ones(2)}
    with pytest.raises(RuntimeError) as theirs:
        Net().load_state_dict(state)
    model = on_meta()
    pipe = compiled(model)
    with pytest.raises(RuntimeError) as ours:
        pipe.load(state)
    assert str(ours.value) == str(theirs.value)
    assert "size mismatch for first.weight" in str(ours.value)
    assert model.first.weight.is_meta and model.last.bias.is_meta
    assert not model.first.bias.is_meta


def test_what_is_missing_stays_on_meta_until_it_is_loaded_too():
    state, model = values(Net()), on_meta()
    pipe = compiled(model)
    first = {name: value for name, value in state.items() if name.startswith("first")}
    result = pipe.load(first, strict=False)
    assert "last.weight" in result.missing_keys
    with pytest.raises(RuntimeError, match=r"\(norm.weight and 5 other tensors\)"):
        pipe(inputs())
    others = {name: value for name, value in state.items() if name not in first}
    result = pipe.load({**others, "more": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["more"]
    assert pipe(inputs()).shape == (ROWS, WIDTH)
    assert all(
        torch.equal(value, state[name])
        for name, value in pipe.state_dict().items()
        if "running" not in name and "batches" not in name
    )


def test_a_buffer_that_old_checkpoints_lack_is_made_as_the_module_makes_it():
    state, model = values(Net()), on_meta()
    del state["norm.num_batches_tracked"]
    assert Net().load_state_dict(state).missing_keys == []  # batch norms know of it
    pipe = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.load(state).missing_keys == []
    assert model.norm.num_batches_tracked == 0
    pipe(inputs())


def test_a_pipeline_without_stages_has_no_device_to_load_on():
    pipe = fxpipe.compile(on_meta(), LANES)
    for give in (lambda: pipe.load(values(Net())), pipe.materialize):
        with pytest.raises(RuntimeError, match=r"has no stages yet.*example_inputs"):
            give()
    with pytest.raises(RuntimeError, match=r"pipe.load\(path\)"):
        pipe(inputs())  # but now it has been cut for this call
    pipe.load(values(Net()))
    pipe(inputs())


# ------------------------------------------------------------------------------- ties and dtypes


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_weight_is_loaded_under_either_name_and_remains_one(name, tmp_path):
    real = Tied()
    state = {
        key: value for key, value in values(real).items() if not key.startswith(("emb", "head"))
    }
    save_file({**state, name: real.head.weight.detach().clone()}, tmp_path / "model.safetensors")
    model = on_meta(Tied)
    ids = torch.randint(9, (ROWS, 4))
    pipe = compiled(model, ids)
    result = pipe.load(tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert model.head.weight is model.embedding.weight
    assert torch.equal(pipe(ids), loop(real, ids))


def test_memory_that_two_tensors_share_remains_shared():
    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(2, WIDTH))
            self.register_buffer("row", self.table[1])

        def forward(self, x):
            return super().forward(x) + self.row

    real = Shared()
    real.table.copy_(torch.randn(2, WIDTH))
    model = on_meta(Shared)
    pipe = compiled(model)
    pipe.load(values(real))
    assert torch.equal(model.table, real.table)
    model.table[1] = 7.0
    assert torch.equal(model.row, torch.full((WIDTH,), 7.0))


def test_the_model_keeps_its_dtype_unless_told():
    state = {
        name: value.double() if value.is_floating_point() else value
        for name, value in values(Net()).items()
    }
    model = on_meta()
    pipe = compiled(model)
    pipe.load(state)
    assert model.first.weight.dtype == torch.float32
    assert torch.equal(model.first.weight, state["first.weight"].float())
    model = on_meta()
    pipe = compiled(model)
    pipe.load(state, assign=True)
    assert model.first.weight.dtype == torch.float64
    assert pipe(inputs().double()).dtype == torch.float64


def test_a_model_that_has_values_can_be_loaded_too():
    model, other = Net(), Net()
    pipe = compiled(model)
    before = list(model.parameters())
    pipe.load(values(other))
    assert all(one is now for one, now in zip(before, model.parameters(), strict=True))
    assert torch.equal(pipe(inputs()), loop(other, inputs()))
    pipe.load({name: v.double() for name, v in values(other).items()}, assign=True)
    assert model.last.weight.dtype == torch.float64


def test_load_state_dict_of_the_pipeline_loads_what_is_on_meta():
    real, model = Net(), on_meta()
    pipe = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.load_state_dict(values(real))
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_weights_that_the_user_has_loaded_alone_are_noticed():
    real, model = Net(), on_meta()
    pipe = compiled(model)
    model.to_empty(device="cpu").load_state_dict(values(real))
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_a_model_that_has_values_may_hold_a_tensor_on_meta_for_its_shape():
    model = Net()
    model.like = torch.empty(3, device="meta")
    pipe = compiled(model)
    assert torch.equal(pipe(inputs()), loop(model, inputs()))
    pipe.load(values(Net()))
    pipe.materialize()  # there is nothing to do
    assert torch.equal(pipe(inputs()), loop(model, inputs()))


# ------------------------------------------------------- buffers that no checkpoint has, new models


def test_a_buffer_that_is_not_saved_is_made_again_by_the_models_own_means():
    real, model = Rotating(), on_meta(Rotating)
    pipe = compiled(model)
    pipe.load(values(real))
    assert torch.equal(model.rotary.frequencies, real.rotary.frequencies)
    assert model.rotary.original is model.rotary.frequencies
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_where_there_are_no_means_it_is_refused_with_what_to_write():
    class Silent(Rotating):
        _init_weights = None

    real, model = Silent(), on_meta(Silent)
    pipe = compiled(model)
    message = r"rotary.frequencies of Silent .*Rotary has no reset_parameters\(\).*give init="
    with pytest.raises(RuntimeError, match=message):
        pipe.load(values(real))
    assert model.first.weight.is_meta  # it is said before anything is read

    def init(module):
        if isinstance(module, Rotary):
            module.frequencies = module.made()  # a new tensor: its values are taken

    frequencies = model.rotary.frequencies
    pipe.load(values(real), init=init)
    assert model.rotary.frequencies is frequencies is model.rotary.original
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_buffers_may_be_real_from_the_beginning():
    model = on_meta(Rotating)
    model.rotary = Rotary()
    pipe = compiled(model)
    real = Rotating()
    pipe.load(values(real))
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_materialize_initialises_as_the_modules_do():
    model = on_meta()
    pipe = compiled(model)
    torch.manual_seed(3)
    pipe.materialize()
    torch.manual_seed(3)
    real = Net()
    for name, value in real.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_materialize_takes_an_init_for_each_module():
    model = on_meta(Rotating)
    pipe = compiled(model)

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.zeros_(module.bias)
        if isinstance(module, Rotary):
            module.frequencies.fill_(2.0)

    pipe.materialize(init)
    assert torch.equal(model.first.weight, torch.full((WIDTH, WIDTH), 0.5))
    assert torch.equal(model.rotary.original, torch.full((WIDTH,), 2.0))


def test_materialize_names_what_init_leaves():
    model = on_meta(Rotating)
    pipe = compiled(model)
    with pytest.raises(RuntimeError, match=r"rotary.frequencies of Rotating.*init has not written"):
        pipe.materialize(lambda m: isinstance(m, nn.Linear) and m.reset_parameters())
    with pytest.raises(RuntimeError, match=r"\(rotary.frequencies\)"):
        pipe(inputs())
    pipe.materialize()  # the rest


def test_materialize_leaves_what_is_loaded():
    state, model = values(Net()), on_meta()
    pipe = compiled(model)
    pipe.load({"last.weight": state["last.weight"]}, strict=False)
    pipe.materialize()
    assert torch.equal(model.last.weight, state["last.weight"])
    assert not model.last.bias.is_meta
    pipe(inputs())


# ------------------------------------------------------------------------------------- real models


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, use_cache=False)
    return LlamaForCausalLM(config)


def test_a_llama_is_loaded_from_the_shards_that_hugging_face_writes(tmp_path):
    real = llama()
    real.save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    with torch.device("meta"):
        model = llama()
    ids = torch.randint(64, (4, 8))
    pipe = fxpipe.compile(model, LANES, chunks=2, example_kwargs={"input_ids": ids})
    pipe.load(tmp_path)
    real.train()
    model.train()
    found = pipe(input_ids=ids).logits
    expected = torch.cat([real(input_ids=part).logits for part in ids.chunk(2)])
    torch.testing.assert_close(found, expected)
    inner = model.model.rotary_emb
    assert torch.equal(inner.inv_freq, real.model.rotary_emb.inv_freq)


def test_names_of_a_checkpoint_may_be_changed(tmp_path):
    real = Net()
    save_file(values(real), tmp_path / "model.safetensors")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x)

    pipe = compiled(on_meta(Wrapped))
    stored = fxpipe.loading.stored_tensors(tmp_path)
    pipe.load({f"net.{name}": tensor for name, tensor in stored.items()})
    assert torch.equal(pipe(inputs()), loop(real, inputs()))


def test_a_llama_whose_buffers_are_real_from_the_beginning(tmp_path):
    real = llama()
    real.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = llama()
    model.model.rotary_emb = real.model.rotary_emb
    ids = torch.randint(64, (4, 8))
    pipe = fxpipe.compile(model, LANES, chunks=2, example_kwargs={"input_ids": ids})
    assert len(pipe.stages) == 2
    frequencies = model.model.rotary_emb.inv_freq
    assert not frequencies.is_meta
    pipe.load(tmp_path)
    found = pipe(input_ids=ids).logits
    expected = torch.cat([real(input_ids=part).logits for part in ids.chunk(2)])
    torch.testing.assert_close(found, expected)
