"""Models of transformers for sound."""

from __future__ import annotations

import torch

from tests.models.registry.entry import (
    LENGTH,
    VOCABULARY,
    sound,
    tensors,
    transformer,
)
from tests.models.registry.text import PAIR
from tests.models.registry.vision import VISION

WAVE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
transformer("audio", "Wav2Vec2Model", sound, **WAVE)
transformer("audio", "Wav2Vec2ForCTC", sound, **WAVE)
transformer("audio", "HubertModel", sound, **WAVE)
transformer("audio", "WavLMModel", sound, **WAVE)
transformer("audio", "UniSpeechModel", sound, **WAVE)
transformer(
    "audio",
    "WhisperForConditionalGeneration",
    lambda batch: {
        "input_features": torch.randn(batch, 8, 32),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)),
    },
    **PAIR,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
)
transformer(
    "audio",
    "ASTForAudioClassification",
    lambda batch: {"input_values": torch.randn(batch, 24, 16)},
    **{k: v for k, v in VISION.items() if k != "image_size"} | {"patch_size": 2},
    max_length=24,
    num_mel_bins=16,
)
transformer("audio", "SEWModel", sound, **WAVE, squeeze_factor=1)
transformer(
    "audio",
    "EncodecModel",
    lambda batch: {"input_values": torch.randn(batch, 1, 640)},
    num_filters=4,
    hidden_size=16,
    upsampling_ratios=[4, 2],
    codebook_size=32,
    codebook_dim=16,
    sampling_rate=800,
    target_bandwidths=[1.0],
)

transformer(
    "audio",
    "MimiModel",
    tensors(input_values=(1, 640)),
    num_filters=4,
    hidden_size=16,
    upsampling_ratios=[4, 2],
    codebook_size=32,
    codebook_dim=8,
    vector_quantization_hidden_dimension=8,
    num_quantizers=4,
    num_semantic_quantizers=1,
    sampling_rate=800,
    frame_rate=50.0,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    upsample_groups=4,
)
transformer(
    "audio",
    "DacModel",
    tensors(input_values=(1, 256)),
    across="its loss has a number for each row, and each of these is the mean over all rows",
    encoder_hidden_size=8,
    decoder_hidden_size=16,
    downsampling_ratios=[2, 2],
    upsampling_ratios=[2, 2],
    n_codebooks=2,
    codebook_size=16,
    codebook_dim=4,
    hidden_size=32,
)
transformer("audio", "Wav2Vec2ConformerModel", sound, **WAVE, conv_depthwise_kernel_size=3)
transformer(
    "audio",
    "Speech2TextForConditionalGeneration",
    lambda batch: {
        "input_features": torch.randn(batch, 16, 8),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)),
    },
    **PAIR,
    input_feat_per_channel=8,
    conv_channels=16,
    max_source_positions=32,
    max_target_positions=32,
)
transformer(
    "audio",
    "MoonshineForConditionalGeneration",
    lambda batch: {
        "input_values": torch.randn(batch, 1000),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)),
    },
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=32,
    encoder_num_hidden_layers=2,
    decoder_num_hidden_layers=2,
    encoder_num_attention_heads=4,
    decoder_num_attention_heads=4,
)
transformer(
    "audio",
    "SpeechT5HifiGan",
    tensors(spectrogram=(8, 8)),
    model_in_dim=8,
    upsample_initial_channel=16,
    upsample_rates=[2, 2],
    upsample_kernel_sizes=[4, 4],
    resblock_kernel_sizes=[3],
    resblock_dilation_sizes=[[1, 3]],
)
