"""Models of diffusers."""

from __future__ import annotations

import torch

from tests.models.registry.entry import of, tensors, with_time

# --------------------------------------------------------------------------------------- diffusers

UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
PICTURE = (4, 16, 16)

of(
    "diffusers",
    "U-Net",
    "UNet2DModel",
    with_time(sample=(3, 16, 16)),
    **UNET,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
    fast=True,
)
of(
    "diffusers",
    "U-Net",
    "UNet2DConditionModel",
    with_time(sample=PICTURE, encoder_hidden_states=(5, 16)),
    **UNET,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=16,
    attention_head_dim=4,
)
of(
    "diffusers",
    "U-Net",
    "UNet1DModel",
    with_time(sample=(2, 32)),
    sample_size=32,
    block_out_channels=(32, 32),
    extra_in_channels=64,
    norm_num_groups=8,
    down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
    up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
)
of(
    "diffusers",
    "U-Net",
    "UNet3DConditionModel",
    with_time(sample=(4, 2, 16, 16), encoder_hidden_states=(5, 16)),
    **UNET,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    cross_attention_dim=16,
    attention_head_dim=4,
)
of(
    "diffusers",
    "U-Net",
    "UVit2DModel",
    lambda batch: {
        "input_ids": torch.randint(16, (batch, 8, 8)),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_text_emb": torch.randn(batch, 16),
        "micro_conds": torch.rand(batch, 5),
    },
    hidden_size=32,
    cond_embed_dim=16,
    micro_cond_encode_dim=2,
    micro_cond_embed_dim=10,
    encoder_hidden_size=16,
    vocab_size=17,
    codebook_size=16,
    in_channels=16,
    block_out_channels=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    block_num_heads=2,
    sample_size=8,
)

AUTOENCODER = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
of("diffusers", "autoencoder", "AutoencoderKL", tensors(sample=(3, 16, 16)), **AUTOENCODER)
of(
    "diffusers",
    "autoencoder",
    "VQModel",
    tensors(sample=(3, 16, 16)),
    **AUTOENCODER,
    num_vq_embeddings=16,
)
of(
    "diffusers",
    "autoencoder",
    "AutoencoderTiny",
    tensors(sample=(3, 16, 16)),
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 2),
    num_decoder_blocks=(2, 1),
)
of(
    "diffusers",
    "autoencoder",
    "AutoencoderDC",
    tensors(sample=(3, 16, 16)),
    in_channels=3,
    latent_channels=4,
    attention_head_dim=2,
    encoder_block_types=("ResBlock", "EfficientViTBlock"),
    decoder_block_types=("ResBlock", "EfficientViTBlock"),
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    encoder_qkv_multiscales=((), (5,)),
    decoder_qkv_multiscales=((), (5,)),
    encoder_layers_per_block=(1, 1),
    decoder_layers_per_block=(1, 1),
    downsample_block_type="conv",
    upsample_block_type="interpolate",
    decoder_norm_types="rms_norm",
    decoder_act_fns="silu",
)

DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "sample_size": 16,
    "patch_size": 4,
    "num_layers": 2,
}
of(
    "diffusers",
    "diffusion transformer",
    "DiTTransformer2DModel",
    lambda batch: {
        **with_time(hidden_states=PICTURE)(batch),
        "class_labels": torch.randint(10, (batch,)),
    },
    **DIT | {"num_layers": 4},
    in_channels=4,
    norm_num_groups=4,
)
of(
    "diffusers",
    "diffusion transformer",
    "PixArtTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    **DIT,
    in_channels=4,
    cross_attention_dim=32,
    caption_channels=16,
    norm_num_groups=4,
    use_additional_conditions=False,
)
of(
    "diffusers",
    "diffusion transformer",
    "SD3Transformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16), pooled_projections=(16,)),
    **DIT,
    in_channels=4,
    out_channels=4,
    joint_attention_dim=16,
    caption_projection_dim=32,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
)
of(
    "diffusers",
    "diffusion transformer",
    "FluxTransformer2DModel",
    lambda batch: {
        **with_time(hidden_states=(16, 4), encoder_hidden_states=(5, 16), pooled_projections=(16,))(
            batch
        ),
        "timestep": torch.rand(batch),
        "img_ids": torch.arange(48.0).view(16, 3) % 4,
        "txt_ids": torch.zeros(5, 3),
    },
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    axes_dims_rope=(2, 2, 4),
)
of(
    "diffusers",
    "diffusion transformer",
    "AuraFlowTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    sample_size=16,
    patch_size=4,
    in_channels=4,
    num_mmdit_layers=2,
    num_single_dit_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=16,
    caption_projection_dim=32,
    out_channels=4,
    pos_embed_max_size=16,
)
of(
    "diffusers",
    "diffusion transformer",
    "SanaTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=2,
    num_cross_attention_heads=4,
    cross_attention_head_dim=8,
    cross_attention_dim=32,
    caption_channels=16,
    sample_size=16,
)
of(
    "diffusers",
    "diffusion transformer",
    "HunyuanDiT2DModel",
    lambda batch: {
        **with_time(
            hidden_states=PICTURE, encoder_hidden_states=(5, 16), encoder_hidden_states_t5=(5, 16)
        )(batch),
        "timestep": torch.rand(batch),
        "text_embedding_mask": torch.ones(batch, 5),
        "text_embedding_mask_t5": torch.ones(batch, 5),
        "image_meta_size": torch.rand(batch, 6),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": (torch.randn(16, 8), torch.randn(16, 8)),
    },
    **DIT,
    in_channels=4,
    hidden_size=32,
    cross_attention_dim=16,
    cross_attention_dim_t5=16,
    pooled_projection_dim=16,
    text_len=5,
    text_len_t5=5,
)
of(
    "diffusers",
    "diffusion transformer",
    "CogVideoXTransformer3DModel",
    with_time(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(5, 16)),
    num_attention_heads=4,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=16,
    num_layers=2,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    patch_size=2,
    max_text_seq_length=5,
)
of(
    "diffusers",
    "diffusion transformer",
    "WanTransformer3DModel",
    with_time(hidden_states=(4, 2, 8, 8), encoder_hidden_states=(5, 16)),
    patch_size=(1, 2, 2),
    num_attention_heads=4,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=32,
)
of(
    "diffusers",
    "diffusion transformer",
    "LuminaNextDiT2DModel",
    lambda batch: {
        "hidden_states": torch.randn(batch, 4, 16, 16),
        "timestep": torch.rand(batch),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "encoder_mask": torch.ones(batch, 5, dtype=torch.bool),
        "image_rotary_emb": torch.polar(torch.ones(16, 16, 4), torch.rand(16, 16, 4)),
        "cross_attention_kwargs": {},
    },
    sample_size=16,
    patch_size=2,
    in_channels=4,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    multiple_of=8,
    cross_attention_dim=16,
)
