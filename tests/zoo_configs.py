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

# Models in which a window's numbers are not those of single steps to the bit, and why. In
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
