"""Models of transformers for time series, and for decisions."""

from __future__ import annotations

import torch

from tests.models.registry.entry import (
    tensors,
    transformer,
)

SERIES = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 8],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
DELAYS = (
    "in train mode delays are chosen by the mean of all rows; in evaluation the library lays them "
    "out in another order of rows and heads than what is delayed, and heads get other rows' delays"
)
for name, across in (
    ("TimeSeriesTransformerForPrediction", ""),
    ("InformerForPrediction", ""),
    ("AutoformerForPrediction", DELAYS),
):
    transformer(
        "series",
        name,  # its loss is the likelihood of a distribution
        lambda batch: {
            "past_values": torch.randn(batch, 20),
            "past_time_features": torch.randn(batch, 20, 2),
            "past_observed_mask": torch.ones(batch, 20),
            "future_values": torch.randn(batch, 4),
            "future_time_features": torch.randn(batch, 4, 2),
        },
        across=across,
        **SERIES,
    )
transformer(
    "series",
    "DecisionTransformerModel",
    lambda batch: {
        **tensors(states=(5, 3), actions=(5, 2), rewards=(5, 1), returns_to_go=(5, 1))(batch),
        "timesteps": torch.arange(5).repeat(batch, 1),
        "attention_mask": torch.ones(batch, 5, dtype=torch.long),
    },
    state_dim=3,
    act_dim=2,
    hidden_size=32,
    max_ep_len=16,
    n_layer=4,
    n_head=4,
    n_positions=32,
)
PATCHES = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
}
transformer(
    "series",
    "PatchTSTForPrediction",
    tensors(past_values=(16, 2), future_values=(4, 2)),
    **PATCHES,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=16,
)
transformer(
    "series",
    "PatchTSMixerForPrediction",
    tensors(past_values=(16, 2), future_values=(4, 2)),
    **PATCHES,
    num_layers=2,
)
