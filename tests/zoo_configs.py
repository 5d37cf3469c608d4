"""The tiny models: configurations, seeds and prompts. One JSON file of `models/` for each file of
`mlx_lm.models`, with every kind of layer that it has, and windows and chunks of 8 tokens.

    config    what the model's `ModelArgs.from_dict` is given
    seed      chosen for the margin guard (`zoo.guard`); `python tools/tiny_model.py NAME` finds one
    spread    weights of two or more axes are normal(0, spread / sqrt(fan_in))
"""

import json
from pathlib import Path
from typing import Any

VOCAB = 97

_FILES = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted((Path(__file__).parent / "models").glob("*.json"))
}
CONFIGS: dict[str, dict[str, Any]] = {name: file["config"] for name, file in _FILES.items()}
SEEDS: dict[str, int] = {name: file["seed"] for name, file in _FILES.items()}
SPREAD: dict[str, float] = {name: file["spread"] for name, file in _FILES.items()}

#: One or two models of every mechanism, for the tests that need not run on all of them.
FAMILIES = (
    "falcon_h1",  # CacheList(ArraysCache, KVCache) in each layer
    "gemma3_text",  # rings
    "gpt_oss",  # rings
    "kimi_linear",  # four slots, and latent attention in the last layer
    "lfm2",  # one slot
    "llama",  # heads of 32, so that its cache can be quantised
    "llama4",  # ChunkedKVCache
    "llama4_text",  # the same without chunks
    "mamba2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)

PROMPTS: tuple[list[int], ...] = (
    [11],
    [1, 5, 9, 2, 7, 60, 33],
    [(7 * i * i + 3 * i + 4) % VOCAB for i in range(40)],
)

# Why a window's numbers are not those of single steps to the bit. In float32 they agree to 1e-5 of
# the largest number of an array; in bfloat16 to nothing useful. Sources are those of mlx-lm 0.32.2.
SSM = (
    "`ssm_update` (ssm.py): a window is summed as one matrix product (`ssm_attn`), a single step "
    "is not (`ssm_update_kernel` or its equivalent)"
)
RING = (
    "`RotatingKVCache` (cache.py), once wrapped: a single step (`_update_in_place`) is read in "
    "ring order, a window (`_update_concat`) in time order"
)
LATENT = (
    "latent attention, `if L == 1` in the attention's `__call__`: a single step multiplies the "
    "query by `embed_q`, a window the keys (`MultiLinear`, mla.py)"
)
GLA = (
    "`recurrent_gla` (bailing_hybrid.py) has one formula for `L == 1` and one for a window; "
    "and its other layers are latent"
)
COMPRESSED = (
    "`Indexer.__call__` (deepseek_v41.py): `argpartition` leaves the chosen groups in an order "
    "that depends on how many groups the window sees, and `_sparse_attention` adds them up in that "
    "order. Rows are then rounded to fp8 or fp4, where a last bit can become a whole step: the "
    "level is near-tie"
)

#: The models in which a verify differs from single steps, each with the reason.
INEXACT_IN_ROUNDS: dict[str, str] = {
    **dict.fromkeys(
        """afmoe baichuan_m1 cohere2 exaone4 exaone_moe gear gemma3 gemma3_text gemma3n gemma4
        gemma4_text gpt_oss iquestloopcoder laguna mellum mimo_v2_flash ministral3 muse_glimmer
        olmo3 recurrent_gemma spark2_5 step3p5""".split(),
        RING,
    ),
    **dict.fromkeys(
        """bailing_moe_v3 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k25
        kimi_k3 kimi_linear kimi_vl longcat_flash longcat_flash_ngram mistral4""".split(),
        LATENT,
    ),
    "bailing_hybrid": GLA,
    "deepseek_v41": COMPRESSED,
}

# Recurrent layers with a window formula are recorded by steps, so that rounds of them are exact.
INEXACT: dict[str, str] = INEXACT_IN_ROUNDS | dict.fromkeys(
    "falcon_h1 granitemoehybrid mamba2 nemotron_h plamo2".split(), SSM
)

#: Models that mlx-lm computes wrongly: windows are not what single tokens are.
REFUSED: dict[str, str] = {
    "phi3small": "`_block_sparse_attention` adds a mask of booleans to the scores, so that a token "
    "sees later ones, in mlx-lm itself",
    "plamo3": "once wrapped, a window shows `window_size + 1` tokens to each of its own "
    "(`Plamo3Decoder.__call__`), a single step `window_size` (`make_cache`), in mlx-lm itself",
}

#: Files of `mlx_lm.models` that cannot run here, and why.
NOT_BUILT: dict[str, str] = {
    "bitnet": "`BitLinear` (bitlinear_layers.py) is a Metal kernel; its caches are `KVCache`",
    "muse_spark": "`qk_norm_rope` (mlx_lm/kernels) is a Metal kernel; its caches are "
    "`RotatingKVCache` and `KVCache`",
    "olmo": "needs the package `hf_olmo`, and in mlx-lm itself fails at any prompt: "
    '`attend` adds the mask `"causal"`, a string',
}

# The CPU multiplies stacked experts (GatherMM) in float32 only.
FLOAT32_ONLY = frozenset(
    """Klear afmoe bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 deepseek deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5_moe exaone_moe gemma4 gemma4_text glm4_moe
    glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoehybrid hunyuan jamba kimi_k25 kimi_k3
    kimi_linear kimi_vl laguna lfm2_moe llama4 longcat_flash longcat_flash_ngram mellum
    mimo_v2_flash minimax minimax_m3_vl mistral4 mixtral nemotron_h olmoe phimoe phixtral
    qwen2_moe qwen3_5_moe qwen3_moe qwen3_next qwen3_vl_moe solar_open step3p5""".split()
)
