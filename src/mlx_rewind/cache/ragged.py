"""Which model files of mlx-lm can feed rows of different lengths in one forward.

Measured, file by file (tests/test_rows.py): every row of an uneven batch has the numbers of a run
by itself. A file that is not listed runs row by row, which is right for every model.
"""

from __future__ import annotations

import mlx.nn as nn

#: Why these files cannot.
ROW_BY_ROW = {
    "afm7": "its shared layers read another layer's cache past the row's own length",
    "baichuan_m1": "one layer is given recurrent and attention caches together",
    "deepseek_v41": "its cache class is its own",
    "gemma2": "its attention does not take a mask per row",
    "gpt_bigcode": "it takes the offset for one number",
    "internlm2": "its rope takes the offset for one number",
    "internlm3": "its rope takes the offset for one number",
    "llama4": "its chunked caches are cut for all rows at once",
    "longcat_flash_ngram": "its n-gram slots differ in length from row to row",
    "minimax_m3_vl": "its block-sparse attention takes the offset for one number",
    "phi3small": "mlx-lm computes its windows wrongly",
    "plamo3": "mlx-lm computes its windows wrongly",
}

#: The files that can.
RAGGED = frozenset(
    """
    Klear afmoe apertus bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 cohere
    cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe falcon_h1 gear gemma gemma3 gemma3_text gemma3n gemma4 gemma4_text
    glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_neox gpt_oss gptj granite granitemoe
    granitemoehybrid helium hunyuan hunyuan_v1_dense iquestloopcoder jamba kimi_k25 kimi_k3
    kimi_linear kimi_vl laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4_text longcat_flash
    mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3 mistral4
    mixtral muse_glimmer nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3
    olmo_hybrid olmoe openelm phi phi3 phimoe phixtral pixtral plamo plamo2
    prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5
    stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()
)


def why_row_by_row(model: nn.Module) -> str | None:
    """Why the rows of a batch of `model` have to be fed one by one; None if they need not."""
    file = type(model).__module__.rpartition(".")[2]
    if file in RAGGED:
        return None
    return ROW_BY_ROW.get(file, f"rows of {file} were not tested together")
