"""``generate()`` of Hugging Face's models over a pipeline, whose cache of keys and values stays on
the stages that use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.runtime.apart import Apart

transformers = pytest.importorskip("transformers")

NEW, CHUNKS = 6, 3
PROMPT = torch.randint(3, 32, (5, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(PROMPT)
PADDED[0, :3] = PADDED[3, :1] = 0


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **IDS))


def llama(kind="Llama", **more):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")
    config = config(**sizes, **heads, vocab_size=32, max_position_embeddings=64, **IDS, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=32, **sizes, **ids)
    return transformers.T5ForConditionalGeneration(config)


def made(make):
    """A model whose most likely tokens are far from equally likely."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def piped(model, stages=2, **options):
    options = {"chunks": CHUNKS, "training": False, **options}
    return fxpipe.compile(model, ["cpu"] * stages, **options)


def by_micro_batches(model, chunks=CHUNKS):
    """The model as a loop over micro-batches, each with a cache of its own, so that its
    ``generate`` is that of the model on the same micro-batches."""
    caches = []

    class Loop(type(model)):
        def __call__(self, past_key_values, **inputs):
            rows = [len(part) for part in inputs["input_ids"].tensor_split(chunks)]
            if not past_key_values.get_seq_length():
                caches[:] = [copy.deepcopy(past_key_values) for _ in rows]
            outputs, start = [], 0
            for count, cache in zip(rows, caches, strict=True):
                part = slice(start, start := start + count)
                own = {n: v[part] if isinstance(v, Tensor) else v for n, v in inputs.items()}
                outputs.append(model(past_key_values=cache, **own))
            outputs[0].logits = torch.cat([output.logits for output in outputs])
            outputs[0].past_key_values = past_key_values
            past_key_values.layers[0].get_seq_length = caches[0].get_seq_length
            return outputs[0]

    loop = object.__new__(Loop)
    object.__setattr__(loop, "__dict__", vars(model))
    return loop


def continued(model, prompt=PROMPT, seed=7, **options):
    torch.manual_seed(seed)
    return model.generate(prompt, max_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_tokens_are_those_of_the_model_on_the_same_micro_batches(make, stages):
    model = made(make)
    expected = by_micro_batches(copy.deepcopy(model))
    with piped(model, stages) as pipe:
        for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 9}):
            assert torch.equal(continued(pipe, **options), continued(expected, **options))


def test_rows_may_be_padded():
    model = made(llama)
    expected = by_micro_batches(copy.deepcopy(model))
    with piped(model) as pipe:
        for options in ({"do_sample": False}, {"do_sample": True}):
            options["attention_mask"] = PADDED
            assert torch.equal(continued(pipe, **options), continued(expected, **options))


def test_there_is_a_program_for_the_prompt_and_one_for_every_later_token():
    model = made(gpt2)
    with piped(model) as pipe:
        continued(pipe)
        assert len(pipe.compilations) == 2
        for seed in range(3):
            continued(pipe, seed=seed, do_sample=True)
            continued(pipe, PROMPT[:4], seed=seed)
        assert len(pipe.compilations) == 2
        for length in (4, 5, 6):  # the first of these shows that the length varies
            prompt = PROMPT[:, :length]
            assert torch.equal(continued(pipe, prompt), continued(model, prompt))
        assert len(pipe.compilations) == 3


def test_the_cache_stays_on_the_stages_in_the_micro_batches_parts():
    model = made(llama)
    with piped(model) as pipe:
        cache = continued(pipe, return_dict_in_generate=True).past_key_values
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert all(type(tensor) is Apart and tensor.is_in_parts for tensor in kept)
        theirs = continued(model, return_dict_in_generate=True).past_key_values
        for ours, other in zip(cache.layers, theirs.layers, strict=True):
            torch.testing.assert_close(ours.keys + 0, other.keys)
            torch.testing.assert_close(ours.values + 0, other.values)


def test_a_beam_search_reorders_the_rows_of_the_cache():
    model = made(gpt2)
    with piped(model) as pipe:
        for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
            assert torch.equal(continued(pipe, **options), continued(model, **options))


def test_an_encoder_and_a_decoder_have_two_caches():
    model = made(t5)
    with piped(model) as pipe:
        assert torch.equal(continued(pipe), continued(model))
        # The first token's cache has one place, of which torch.export makes a constant.
        assert len(pipe.compilations) == 3


@pytest.mark.long  # so it is for the model whose window is refused, below
def test_without_a_cache_every_call_has_the_whole_text():
    model = made(gpt2)
    with piped(model) as pipe:
        assert torch.equal(continued(pipe, use_cache=False), continued(model, use_cache=False))


def test_a_pipeline_that_trains_generates_too():
    model = made(gpt2)
    with piped(model, training=True) as pipe:
        assert torch.equal(continued(pipe), continued(model))


def test_in_inference_mode():
    model = made(gpt2)
    with piped(model) as pipe, torch.inference_mode():
        assert torch.equal(continued(pipe), continued(model))


def test_the_callers_cache_is_written_to_as_the_model_writes_to_it():
    model = made(gpt2)
    token = PROMPT[:, :1]
    with piped(model) as pipe:
        ours, theirs = transformers.DynamicCache(), transformers.DynamicCache()
        for x in (PROMPT, token, token):  # gradients are enabled here
            output = pipe(x, past_key_values=ours)
            assert output.past_key_values is ours
            layer = ours.layers[0]
            assert type(layer.keys) is Tensor and layer.keys.requires_grad
            expected = model(x, past_key_values=theirs)
            torch.testing.assert_close(output.logits, expected.logits)
            torch.testing.assert_close(layer.keys, theirs.layers[0].keys)
        assert ours.get_seq_length() == PROMPT.shape[1] + 2


def test_a_cache_that_is_written_to_and_not_returned_is_refused():
    with piped(made(gpt2)) as pipe:
        with pytest.raises(RuntimeError, match="tensor into the argument past_key_values"):
            pipe(PROMPT, past_key_values=transformers.DynamicCache(), use_cache=False)
        assert continued(pipe).shape == (5, 7 + NEW)


def test_a_static_cache_counts_in_a_tensor_that_all_rows_share_and_takes_one_micro_batch():
    model = made(gpt2)
    with piped(model) as pipe, pytest.raises(ValueError, match="or use chunks=1"):
        continued(pipe, cache_implementation="static")
    with piped(model, chunks=1) as pipe:
        static = {"cache_implementation": "static"}
        assert torch.equal(continued(pipe, **static), continued(model, **static))


def test_a_window_that_counts_in_a_number_is_refused():
    model = made(lambda: llama("Mistral", sliding_window=4))
    with piped(model) as pipe:
        with pytest.raises(RuntimeError, match=r"cumulative_length is a number .* use_cache=False"):
            continued(pipe)
        assert torch.equal(continued(pipe, use_cache=False), continued(model, use_cache=False))
