"""Models of transformers that see and hear, and those of other series than text."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.registry.entry import (
    IMAGE,
    LENGTH,
    VOCABULARY,
    pictures_and_text,
    pixels,
    sound,
    tensors,
    tokens,
    transformer,
    translated,
)
from tests.models.registry.text import CAUSAL, PAIR, T5, TEXT

# ---------------------------------------------------------------------- transformers: vision, audio

VISION = {
    "image_size": IMAGE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

transformer("vision", "ViTForImageClassification", pixels, fast=True, **VISION)
transformer("vision", "DeiTForImageClassification", pixels, **VISION)
transformer("vision", "BeitForImageClassification", pixels, **VISION)
transformer("vision", "Dinov2ForImageClassification", pixels, **VISION)
transformer(
    "vision",
    "ViTMAEForPreTraining",
    lambda batch: {**pixels(batch), "noise": torch.rand(batch, 16)},
    **VISION,
    decoder_hidden_size=32,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
transformer(
    "vision",
    "SwinForImageClassification",
    pixels,
    image_size=IMAGE,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)
transformer(
    "vision",
    "ConvNextForImageClassification",
    pixels,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 2, 1],
)
transformer(
    "vision",
    "ResNetForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
)
transformer(
    "vision",
    "SegformerForSemanticSegmentation",
    pixels,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    decoder_hidden_size=16,
    num_attention_heads=[1, 2, 2, 4],
)
transformer(
    "vision",
    "MobileViTForImageClassification",
    pixels,
    image_size=IMAGE,
    hidden_sizes=[16, 16, 16],
    neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 16],
    num_attention_heads=2,
)
transformer(
    "vision",
    "RegNetForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    groups_width=8,
)
transformer(
    "vision",
    "DPTForDepthEstimation",
    pixels,
    **VISION,
    neck_hidden_sizes=[8, 8, 8, 8],
    fusion_hidden_size=8,
    backbone_out_indices=[0, 1, 2, 3],
)

transformer(
    "vision",
    "PoolFormerForImageClassification",
    pixels,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
)
transformer(
    "vision",
    "PvtV2ForImageClassification",
    pixels,
    image_size=IMAGE,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
)
transformer(
    "vision",
    "FocalNetForImageClassification",
    pixels,
    image_size=IMAGE,
    patch_size=2,
    embed_dim=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    focal_levels=[1, 1],
    focal_windows=[3, 3],
)
transformer(
    "vision",
    "BitForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    num_groups=4,
)
transformer(
    "vision",
    "GLPNForDepthEstimation",
    pixels,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    decoder_hidden_size=16,
    num_attention_heads=[1, 2, 2, 4],
)

# ------------------------------------------------------------------------------ transformers: video

FRAMES = tensors(pixel_values=(4, 3, IMAGE, IMAGE))

transformer(
    "video", "VideoMAEForVideoClassification", FRAMES, **VISION, num_frames=4, tubelet_size=2
)
transformer(
    "video",
    "VivitForVideoClassification",
    FRAMES,
    **{key: value for key, value in VISION.items() if key != "patch_size"},
    num_frames=4,
    tubelet_size=[2, 8, 8],
)
transformer("video", "TimesformerForVideoClassification", FRAMES, **VISION, num_frames=4)

# ------------------------------------------------------- transformers: detection and segmentation

SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
}
SMALL_SWIN = {
    "model_type": "swin",
    "image_size": IMAGE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {**SMALL_RESNET, "out_features": ["stage4"]},
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 5,
}
LARGE = tensors(pixel_values=(3, 2 * IMAGE, 2 * IMAGE))

transformer("detection and segmentation", "DetrForObjectDetection", pixels, **DETR)
transformer("detection and segmentation", "ConditionalDetrForObjectDetection", pixels, **DETR)
transformer(
    "detection and segmentation",
    "DeformableDetrForObjectDetection",
    LARGE,
    **DETR | {"backbone_config": {**SMALL_RESNET, "out_features": ["stage2", "stage3", "stage4"]}},
)
transformer(
    "detection and segmentation",
    "YolosForObjectDetection",
    pixels,
    **VISION | {"image_size": [IMAGE, IMAGE]},
    num_detection_tokens=4,
)
transformer(
    "detection and segmentation",
    "MaskFormerForInstanceSegmentation",
    LARGE,
    backbone_config={**SMALL_SWIN, "image_size": 2 * IMAGE},
    decoder_config={
        "model_type": "detr",
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 32,
        "num_queries": 4,
    },
    fpn_feature_size=32,
    mask_feature_size=32,
)
transformer(
    "detection and segmentation",
    "SuperPointForKeypointDetection",
    pixels,
    encoder_hidden_sizes=[8, 8, 8, 8],
    decoder_hidden_size=8,
    descriptor_decoder_dim=8,
)
transformer(
    "detection and segmentation",
    "SamModel",
    lambda batch: {**pixels(batch), "input_points": torch.rand(batch, 1, 2, 2) * IMAGE},
    vision_config={
        **VISION,
        "output_channels": 16,
        "mlp_dim": 64,
        "window_size": 2,
        "global_attn_indexes": [1, 3],
        "num_pos_feats": 8,
    },
    prompt_encoder_config={
        "hidden_size": 16,
        "image_size": IMAGE,
        "patch_size": 8,
        "mask_input_channels": 4,
    },
    mask_decoder_config={
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 16,
    },
)
transformer(
    "detection and segmentation",
    "UperNetForSemanticSegmentation",  # in train mode its auxiliary head's output is of no use
    LARGE,
    backbone_config=SMALL_SWIN,
    hidden_size=16,
    auxiliary_in_channels=32,
    auxiliary_channels=16,
    pool_scales=[1, 2],
)

# ------------------------------------------------------------------ transformers: text and vision

transformer("text and vision", "CLIPTextModel", tokens, **TEXT)
transformer("text and vision", "CLIPVisionModel", pixels, **VISION)
transformer("text and vision", "SiglipVisionModel", pixels, **VISION)
for name in "CLIPModel", "SiglipModel":
    transformer(
        "text and vision",
        name,
        pictures_and_text,
        # every image with every text, of a micro-batch
        options={"out_dims": {"logits_per_image": 0, "logits_per_text": 0}},
        text_config={**TEXT, "num_hidden_layers": 2},
        vision_config={**VISION, "num_hidden_layers": 2},
    )
transformer(
    "text and vision",
    "BlipForImageTextRetrieval",
    pictures_and_text,
    text_config={**TEXT, "num_hidden_layers": 2, "encoder_hidden_size": 32},
    vision_config={**VISION, "num_hidden_layers": 2},
)


def illustrated(batch: int) -> dict[str, Tensor]:
    """Text with a place for each of an image's 16 patches."""
    given = torch.randint(3, VOCABULARY - 2, (batch, LENGTH + 16))
    given[:, 1:17] = VOCABULARY - 1
    return {"input_ids": given, **pixels(batch)}


transformer(
    "text and vision",
    "LlavaForConditionalGeneration",
    illustrated,
    text_config={**TEXT, "model_type": "llama", "num_hidden_layers": 2},
    vision_config={**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2},
    image_token_index=VOCABULARY - 1,
)
transformer(
    "text and vision",
    "LayoutLMv3ForTokenClassification",
    lambda batch: {
        **pictures_and_text(batch),
        "bbox": torch.randint(30, (batch, LENGTH, 4)).sort(-1).values,
    },
    **TEXT,
    max_2d_position_embeddings=32,
    input_size=IMAGE,
    patch_size=8,
    coordinate_size=6,
    shape_size=4,
)
transformer(
    "text and vision",
    "VisionEncoderDecoderModel",  # of TrOCR
    lambda batch: {
        **pixels(batch),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)),
    },
    encoder={**VISION, "model_type": "vit", "num_hidden_layers": 2},
    decoder={
        "model_type": "trocr",
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 32,
        "is_decoder": True,
        "add_cross_attention": True,
    },
)

transformer(
    "text and vision",
    "CLIPSegForImageSegmentation",
    pictures_and_text,
    text_config={**TEXT, "num_hidden_layers": 2},
    vision_config=VISION,
    extract_layers=[1, 2, 3],
    reduce_dim=8,
    decoder_num_attention_heads=2,
    projection_dim=16,
    decoder_intermediate_size=16,
)
transformer(
    "text and vision", "ViltForMaskedLM", pictures_and_text, **TEXT, image_size=IMAGE, patch_size=8
)
transformer(
    "text and vision",
    "Blip2ForConditionalGeneration",
    illustrated,
    text_config={
        **TEXT,
        "model_type": "opt",
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    },
    vision_config={**VISION, "num_hidden_layers": 2},
    qformer_config={
        **TEXT,
        "num_hidden_layers": 2,
        "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
    },
    num_query_tokens=16,
    image_token_index=VOCABULARY - 1,
)
transformer(
    "text and vision",
    "PaliGemmaForConditionalGeneration",
    # As its processor gives them: 0 for the prefix, within which all see all. Without, the library
    # makes another mask where a model is traced.
    lambda batch: {
        **illustrated(batch),
        "token_type_ids": (torch.arange(LENGTH + 16) > 18).long().repeat(batch, 1),
    },
    text_config={**CAUSAL, "model_type": "gemma", "num_hidden_layers": 2, "head_dim": 8},
    vision_config={**VISION, "model_type": "siglip_vision_model", "num_hidden_layers": 2},
    projection_dim=32,
    image_token_id=VOCABULARY - 1,
)
transformer(
    "text and vision",
    "UdopForConditionalGeneration",
    lambda batch: {
        **translated(batch),
        **pixels(batch),
        "bbox": torch.rand(batch, LENGTH, 4).sort(-1).values,
    },
    **T5,
    image_size=IMAGE,
    patch_size=8,
    max_2d_position_embeddings=32,
)

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

# -------------------------------------------------------------- transformers: series and decisions

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
for name in (
    "TimeSeriesTransformerForPrediction",
    "InformerForPrediction",
    "AutoformerForPrediction",
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
