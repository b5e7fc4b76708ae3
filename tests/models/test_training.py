"""What people do with models of transformers and diffusers while they train them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fxpipe
from tests.zoo import gradients

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

TWO = ["cpu", "cpu"]
VOCABULARY, LENGTH = 64, 12


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def padded(rows=6):
    """Rows of several lengths, as a tokenizer gives them; of what is padding, no label."""
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH, (rows, 1))).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def unet():
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def test_a_loss_over_so_many_tokens_is_that_of_the_batch():
    """As transformers' own training loop asks for it, which knows how many there are in all."""
    model, inputs = gpt2(), padded()
    twin = copy.deepcopy(model)
    inputs["num_items_in_batch"] = (inputs["labels"] != -100).sum() * 2
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        loss, expected = pipe(**inputs).loss, twin(**inputs).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(gradients(model), gradients(twin))
        model.zero_grad()
        torch.testing.assert_close(pipe.step(**inputs), expected.detach())
        torch.testing.assert_close(gradients(model), gradients(twin))


def test_the_vocabulary_may_grow():
    model, inputs = gpt2(), padded()
    del inputs["labels"]  # a loss would be checked, too, and what it is a mean of be looked for
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        assert pipe(**inputs).logits.shape[-1] == VOCABULARY
        model.resize_token_embeddings(VOCABULARY + 16, mean_resizing=False)
        torch.testing.assert_close(pipe(**inputs).logits, model(**inputs).logits)


def test_a_configuration_may_change():
    model, inputs = gpt2(), padded()
    del inputs["labels"]
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        assert pipe(**inputs).hidden_states is None
        pipe.config.output_hidden_states = True
        found, expected = pipe(**inputs).hidden_states, model(**inputs).hidden_states
        torch.testing.assert_close(found, expected)


def test_random_numbers_outside_of_the_model_are_those_without_a_pipeline():
    """Noise and times of a diffusion model: its attention has no dropout, and draws none."""

    def trained(wrap):
        torch.manual_seed(0)
        model, schedule = unet().double(), diffusers.DDPMScheduler(num_train_timesteps=20)
        run = wrap(model)
        optimizer = torch.optim.SGD(run.parameters(), 0.1)
        for _ in range(3):
            clean, times = torch.randn(4, 1, 8, 8).double(), torch.randint(0, 20, (4,))
            noise = torch.randn_like(clean)
            guess = run(schedule.add_noise(clean, noise, times), times).sample
            F.mse_loss(guess, noise).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    pipe = trained(lambda model: fxpipe.compile(model, TWO, chunks=2))
    torch.testing.assert_close(pipe, trained(lambda model: model))


def test_a_sampler_of_diffusers_takes_a_pipeline_for_its_model():
    model = unet().eval()

    def images(network):
        sampler = diffusers.DDPMPipeline(network, diffusers.DDPMScheduler(num_train_timesteps=4))
        sampler.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return sampler(
            batch_size=4, generator=generator, num_inference_steps=2, output_type="np"
        ).images

    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        np.testing.assert_allclose(images(pipe), images(model), atol=1e-5)
