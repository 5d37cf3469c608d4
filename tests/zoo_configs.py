"""The configurations, seeds and prompts of the tiny models in `zoo`."""

from typing import Any

VOCAB = 97

_QWEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_QWEN_MOE = {
    **_QWEN,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

# Every kind of layer of the family, windows and chunks of 8 tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5", **_QWEN},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **_QWEN_MOE},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_QWEN_MOE,
        "mlp_only_layers": [0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "rope_theta": 10000.0,
    },
    # Each layer has both kinds: CacheList(ArraysCache, KVCache).
    "falcon_h1": {
        "model_type": "falcon_h1",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # Four-slot ArraysCache, and latent attention in the last layer.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "vocab_size": VOCAB,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 512,
    },
    # The text-only model has plain caches; only `llama4` uses ChunkedKVCache.
    "llama4_text": {
        "model_type": "llama4_text",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "intermediate_size": 96,
        "intermediate_size_mlp": 96,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 8,
            "head_dim": 16,
            "hidden_size": 64,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "max_position_embeddings": 512,
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "vocab_size": VOCAB,
            "floor_scale": 8,
        },
    },
    # Heads of 32, so that its cache can be quantised.
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    },
}

PROMPTS: tuple[list[int], ...] = (
    [11],
    [1, 5, 9, 2, 7],
    [(7 * i * i + 3 * i + 4) % VOCAB for i in range(20)],
)

# Chosen so that 64 greedy tokens after each prompt have at least 12 different ones and no two
# best logits closer than 0.01: a token that differs is then a bug and not a near-tie.
SEEDS: dict[str, int] = {
    "qwen3_5": 0,
    "qwen3_5_moe": 4,
    "qwen3_next": 10,
    "mamba2": 1,
    "lfm2": 1,
    "falcon_h1": 4,
    "kimi_linear": 17,
    "gpt_oss": 15,
    "gemma3_text": 0,
    "llama4_text": 0,
    "llama4": 1,
    "llama": 4,
}

# Weights are normal(0, SPREAD / sqrt(fan_in)). With 3, the routers of gpt_oss amplify a
# difference in the last bit to 1.4e-5 of the logits.
SPREAD = dict.fromkeys(CONFIGS, 3.0) | {"gpt_oss": 2.0}

# Families in which a window's numbers are not those of single steps to the bit, and why. In
# float32 they agree to 1e-5 of the largest number of an array; in bfloat16 to nothing useful.
_SSM = "ssm_attn sums the tokens of a window as one matrix product, and rounds a step differently"
_RING = "a single step reads a wrapped ring in ring order, a window reads it in time order"
INEXACT: dict[str, str] = {
    "mamba2": _SSM,
    "falcon_h1": _SSM,
    "kimi_linear": "latent attention projects the query in a single step, the keys in a window",
    "gpt_oss": _RING,
    "gemma3_text": _RING,
}

# Recurrent layers with a window formula are recorded by steps, so that rounds of them are exact.
INEXACT_IN_ROUNDS = {name: why for name, why in INEXACT.items() if why is not _SSM}

# The CPU multiplies the stacked experts of these in float32 only.
FLOAT32_ONLY = frozenset({"qwen3_5_moe", "qwen3_next", "kimi_linear", "gpt_oss", "llama4"})
