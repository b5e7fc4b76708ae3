"""Models of transformers for text and images together."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.registry.entry import (
    IMAGE,
    LENGTH,
    VOCABULARY,
    pictures_and_text,
    pixels,
    tokens,
    transformer,
    translated,
)
from tests.models.registry.text import CAUSAL, T5, TEXT
from tests.models.registry.vision import VISION

transformer("text and vision", "CLIPTextModel", tokens, **TEXT)
transformer("text and vision", "CLIPVisionModel", pixels, **VISION)
transformer("text and vision", "SiglipVisionModel", pixels, **VISION)
for name in "CLIPModel", "SiglipModel":
    transformer(
        "text and vision",
        name,
        pictures_and_text,
        options={"out_dims": {"logits_per_image": 0, "logits_per_text": 0}},
        across="it scores every image with every text, so that these are those of a micro-batch",
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
