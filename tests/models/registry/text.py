"""Models of transformers for text: encoders, decoders, both, mixtures, state spaces."""

from __future__ import annotations

from tests.models.registry.entry import (
    VOCABULARY,
    ids,
    labelled,
    tensors,
    tokens,
    transformer,
    translated,
)

# --------------------------------------------------------------------------- transformers: encoders

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

transformer("encoder", "BertForMaskedLM", labelled, fast=True, **TEXT)
transformer("encoder", "RobertaForMaskedLM", labelled, **TEXT)
transformer("encoder", "AlbertForMaskedLM", labelled, **TEXT, embedding_size=16)
transformer("encoder", "DistilBertForMaskedLM", labelled, **TEXT | {"intermediate_size": None})
transformer("encoder", "ElectraForPreTraining", tokens, **TEXT, embedding_size=16)
transformer(
    "encoder",
    "DebertaForMaskedLM",
    labelled,
    **TEXT,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    type_vocab_size=0,
)
transformer(
    "encoder",
    "DebertaV2ForMaskedLM",
    labelled,
    **TEXT,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    type_vocab_size=0,
)
transformer("encoder", "MPNetForMaskedLM", labelled, **TEXT)
transformer("encoder", "ModernBertForMaskedLM", labelled, **TEXT)
transformer("encoder", "XLMRobertaModel", tokens, **TEXT)
transformer("encoder", "FNetForMaskedLM", ids, **TEXT)
transformer("encoder", "LongformerForMaskedLM", tokens, **TEXT, attention_window=4)
transformer("encoder", "EsmForMaskedLM", tokens, **TEXT, mask_token_id=3)
transformer(
    "encoder", "XLNetLMHeadModel", labelled, vocab_size=VOCABULARY, d_model=32, n_layer=4, n_head=4
)

transformer("encoder", "ConvBertForMaskedLM", labelled, **TEXT, embedding_size=32)
transformer(
    "encoder",
    "FunnelForMaskedLM",
    labelled,
    vocab_size=VOCABULARY,
    block_sizes=[2, 2],
    d_model=32,
    n_head=4,
    d_head=8,
    d_inner=64,
    num_decoder_layers=1,
)
transformer("encoder", "SqueezeBertForMaskedLM", labelled, **TEXT, embedding_size=32)
transformer("encoder", "YosoForMaskedLM", labelled, **TEXT)
transformer(
    "encoder",
    "PerceiverModel",
    tensors(inputs=(8, 16)),
    d_model=16,
    num_latents=4,
    d_latents=16,
    num_blocks=1,
    num_self_attends_per_block=2,
    num_self_attention_heads=2,
    num_cross_attention_heads=2,
)

# --------------------------------------------------------------------------- transformers: decoders

CAUSAL = TEXT | {"num_key_value_heads": 2}

transformer("decoder", "GPT2LMHeadModel", labelled, fast=True, **TEXT | {"intermediate_size": None})
transformer(
    "decoder",
    "GPTNeoForCausalLM",
    labelled,
    **TEXT,
    attention_types=[[["global", "local"], 2]],
    window_size=4,
)
transformer("decoder", "GPTNeoXForCausalLM", labelled, **TEXT)
transformer(
    "decoder", "GPTJForCausalLM", labelled, **TEXT | {"intermediate_size": None}, rotary_dim=4
)
transformer("decoder", "GPTBigCodeForCausalLM", labelled, **TEXT | {"intermediate_size": None})
transformer(
    "decoder", "CodeGenForCausalLM", labelled, **TEXT | {"intermediate_size": None}, rotary_dim=4
)
transformer("decoder", "OPTForCausalLM", labelled, **TEXT, ffn_dim=64, word_embed_proj_dim=32)
transformer("decoder", "BloomForCausalLM", labelled, **TEXT)
transformer("decoder", "LlamaForCausalLM", labelled, fast=True, **CAUSAL)
transformer("decoder", "Qwen2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Qwen3ForCausalLM", labelled, **CAUSAL, head_dim=8)
transformer("decoder", "MistralForCausalLM", labelled, **CAUSAL, sliding_window=4)
transformer("decoder", "GemmaForCausalLM", labelled, **CAUSAL, head_dim=8)
transformer("decoder", "Gemma2ForCausalLM", labelled, **CAUSAL, head_dim=8, sliding_window=4)
transformer("decoder", "Gemma3ForCausalLM", labelled, **CAUSAL, head_dim=8, sliding_window=4)
transformer("decoder", "PhiForCausalLM", labelled, **TEXT)
transformer("decoder", "Phi3ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "StableLmForCausalLM", labelled, **CAUSAL)
transformer("decoder", "FalconForCausalLM", labelled, **TEXT)
transformer("decoder", "OlmoForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Olmo2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "GraniteForCausalLM", labelled, **CAUSAL)
transformer("decoder", "CohereForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Starcoder2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "SmolLM3ForCausalLM", labelled, **CAUSAL)

transformer(
    "decoder",
    "DiffLlamaForCausalLM",
    labelled,
    double=True,  # the gradient of a difference of attentions by its scale is a sum of all of them
    **CAUSAL,
)
transformer(
    "decoder",
    "CTRLLMHeadModel",
    labelled,
    vocab_size=VOCABULARY,
    n_positions=32,
    n_embd=32,
    dff=64,
    n_layer=3,
    n_head=4,
)
transformer(
    "decoder",
    "MptForCausalLM",
    labelled,
    vocab_size=VOCABULARY,
    d_model=32,
    n_heads=4,
    n_layers=3,
    max_seq_len=32,
)
transformer(
    "decoder",
    "Lfm2ForCausalLM",
    labelled,
    **CAUSAL,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
)

# -------------------------------------------------------------------- transformers: encoder-decoder

PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

transformer("encoder-decoder", "T5ForConditionalGeneration", labelled, fast=True, **T5)
transformer(
    "encoder-decoder",
    "MT5ForConditionalGeneration",
    translated,
    **T5,
    feed_forward_proj="gated-gelu",
)
transformer("encoder-decoder", "BartForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "PegasusForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "MBartForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "MarianMTModel", translated, **PAIR)
transformer("encoder-decoder", "M2M100ForConditionalGeneration", translated, **PAIR)
transformer(
    "encoder-decoder",
    "ProphetNetForConditionalGeneration",
    translated,
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "encoder_ffn_dim": 64,
        "num_encoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 32,
    },
)

transformer(
    "encoder-decoder",
    "LongT5ForConditionalGeneration",
    translated,
    **T5,
    local_radius=4,
)
transformer("encoder-decoder", "UMT5ForConditionalGeneration", translated, **T5)
transformer(
    "encoder-decoder",
    "FSMTForConditionalGeneration",
    translated,
    **{key: value for key, value in PAIR.items() if key != "vocab_size"},
    langs=["en", "de"],
    src_vocab_size=VOCABULARY,
    tgt_vocab_size=VOCABULARY,
)

# -------------------------------------------------------- transformers: mixtures, and state spaces

EXPERTS = CAUSAL | {"num_experts_per_tok": 2}

transformer("mixture of experts", "MixtralForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer(
    "mixture of experts",
    "Qwen2MoeForCausalLM",
    labelled,
    **EXPERTS,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
transformer(
    "mixture of experts",
    "Qwen3MoeForCausalLM",
    labelled,
    **EXPERTS,
    num_experts=4,
    moe_intermediate_size=16,
    head_dim=8,
)
transformer("mixture of experts", "OlmoeForCausalLM", labelled, **EXPERTS, num_experts=4)
transformer("mixture of experts", "GraniteMoeForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer("mixture of experts", "PhimoeForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer(
    "mixture of experts",
    "GptOssForCausalLM",
    labelled,
    **EXPERTS,
    num_local_experts=4,
    head_dim=8,
    sliding_window=4,
)
transformer(
    "mixture of experts",
    "SwitchTransformersForConditionalGeneration",
    translated,
    **T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
transformer(
    "mixture of experts",
    "DeepseekV3ForCausalLM",
    labelled,
    **EXPERTS | {"num_key_value_heads": 4},
    kv_lora_rank=8,
    q_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
transformer(
    "mixture of experts",
    "DeepseekV2ForCausalLM",
    labelled,
    **EXPERTS | {"num_key_value_heads": 4},
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
transformer(
    "mixture of experts",
    "Llama4ForCausalLM",
    labelled,
    **CAUSAL,
    head_dim=8,
    num_local_experts=4,
    intermediate_size_mlp=32,
)
transformer(
    "mixture of experts",
    "NllbMoeForConditionalGeneration",
    translated,
    **PAIR,
    num_experts=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
)
transformer("state space", "MambaForCausalLM", ids, **TEXT, state_size=4)
transformer(
    "state space",
    "Mamba2ForCausalLM",
    ids,
    **TEXT,
    state_size=8,
    num_heads=4,
    head_dim=16,
    n_groups=2,
)
transformer("state space", "FalconMambaForCausalLM", ids, **TEXT, state_size=4)
transformer(
    "state space",
    "RwkvForCausalLM",
    ids,
    warm=True,  # it scales its weights
    **TEXT,
    attention_hidden_size=32,
    use_cache=False,  # into which it writes, so that with it there is no backward in eval mode
)
transformer("state space", "RecurrentGemmaForCausalLM", labelled, **CAUSAL, lru_width=32)
transformer(
    "state space",
    "JambaForCausalLM",
    labelled,
    **EXPERTS,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    mamba_d_state=4,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)
SSM = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
transformer(
    "state space",
    "BambaForCausalLM",
    labelled,
    **CAUSAL,
    **SSM,
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_head=8,
)
transformer(
    "state space",
    "Qwen3NextForCausalLM",  # linear attention, and a mixture of experts
    labelled,
    **EXPERTS | {"num_hidden_layers": 2},
    layer_types=["linear_attention", "full_attention"],
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
