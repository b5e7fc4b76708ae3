"""Models from Hugging Face's transformers, unchanged, on four stages, on real text."""

from __future__ import annotations

import copy
import inspect
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpipe
from fxpipe.schedule import NAMES, named
from tests.zoo import gradients, same, step_of_loop

transformers = pytest.importorskip("transformers")

LENGTH, BATCH, CHUNKS, STEPS = 32, 6, 3, 10


def text(count: int) -> Tensor:
    """Bytes of a source file of the Python standard library, in rows."""
    data = inspect.getsource(textwrap).encode()[: count * LENGTH]
    return torch.tensor(list(data)).view(count, LENGTH)


def gpt2(dropout=0.0, layers=4):
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config).train()


def bert():
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [gpt2, bert])
def test_ten_adam_steps_on_real_text_are_those_of_the_model(make):
    model = make()
    own = copy.deepcopy(model)
    pipe = fxpipe.compile(own, ["cpu"] * 4, chunks=CHUNKS)
    adam, ours = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, own))
    losses = []
    for ids in text(BATCH * STEPS).split(BATCH):
        adam.zero_grad()
        plain = model(input_ids=ids, labels=ids)
        plain.loss.backward()
        adam.step()

        ours.zero_grad()
        piped = pipe(input_ids=ids, labels=ids)
        piped.loss.backward()
        ours.step()
        losses.append((plain.loss.item(), piped.loss.item()))
    assert type(piped) is type(plain)
    assert piped.logits.shape == plain.logits.shape
    assert len(losses) == STEPS and losses[-1][0] < losses[0][0] - 0.1, "it learns"
    assert max(abs(a - b) for a, b in losses) <= 1e-5
    assert [stage.index for stage in pipe.stages] == [0, 1, 2, 3]
    assert all(stage.cost.forward_s > 0 for stage in pipe.stages)
    pipe.close()


def test_with_dropout_every_run_and_checkpoint_mode_gives_the_same_bits():
    model, ids = gpt2(dropout=0.1, layers=2), text(BATCH)
    seen = []
    for mode in ("never", "always", "always"):
        with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, checkpoint=mode) as pipe:
            model.zero_grad()
            torch.manual_seed(1)
            pipe(ids, labels=ids).loss.backward()
            seen.append(gradients(model))
    assert same(seen[0], seen[1]) and same(seen[1], seen[2])


def test_the_state_dict_is_the_models_both_ways():
    model = gpt2(layers=2)
    ids = text(2)
    pipe = fxpipe.compile(model, ["cpu"] * 2, example_kwargs={"input_ids": ids, "labels": ids})
    other = gpt2(layers=2)
    other.load_state_dict(pipe.state_dict(), strict=True)
    fresh = gpt2(layers=2)
    pipe.load_state_dict(fresh.state_dict(), strict=True)
    expected = fresh.eval()(input_ids=ids, labels=ids).loss
    pipe.eval()
    assert abs(pipe(input_ids=ids, labels=ids).loss.item() - expected.item()) <= 1e-5
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(p is q for p, q in zip(pipe.parameters(), model.parameters(), strict=True))


def test_a_cache_of_keys_and_values_comes_out_and_goes_in_again():
    model, ids = gpt2(layers=2).eval(), text(4)
    model.config.use_cache = True
    prompt, token = ids[:, :-1], ids[:, -1:]
    with torch.no_grad(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        output = pipe(input_ids=prompt)
        assert type(output.past_key_values) is transformers.DynamicCache
        assert output.past_key_values.get_seq_length() == LENGTH - 1
        output = pipe(input_ids=token, past_key_values=output.past_key_values)
        assert output.past_key_values.get_seq_length() == LENGTH
        expected = model(input_ids=ids).logits[:, -1:]
    torch.testing.assert_close(output.logits, expected)


def next_byte(output, x: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.one_in(5)
@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", NAMES)
def test_a_step_of_gpt2_gives_the_gradients_of_the_loop_in_any_schedule(schedule, checkpoint):
    """Four devices, up to eight stages, micro-batches of two rows and of one, tied weights."""
    model, x = gpt2(layers=8), text(11)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 4, chunks=8, schedule=schedule, checkpoint=checkpoint, loss_fn=next_byte
    ) as pipe:
        loss = pipe.step(x, target=x)
        order = named(schedule, lanes=4, microbatches=8, stages=len(pipe.stages))
        wanted = step_of_loop(reference, (x,), x, pipe, order, 8, next_byte)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-6, atol=0)
    assert same(gradients(model), wanted[1])
