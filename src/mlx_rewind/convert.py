"""`mlx_lm.convert`, with the multi-token prediction heads that it drops.

    trunk    cast, quantised, dequantised and saved by mlx-lm's own functions: the same files
    heads    mtp/weights.safetensors and mtp/config.json, which mlx-lm does not look at
    check    what was written is loaded, and proposes what the heads in memory propose

The folder appears when all of that is done, or not at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm import utils
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, mixed_quant_predicate_builder
from mlx_lm.models.cache import make_prompt_cache

from .draft import checkpoint
from .draft.checkpoint import RECORD, Norms, folder_of
from .draft.families import REFUSED
from .draft.heads import Head
from .draft.loading import HeadReport, load_heads
from .draft.mtp import MTP
from .errors import UnsupportedModelError
from .load import head_is_missing, load_checkpoint
from .target import Target

#: Called as each stage begins, and at the end with "done": (stage, its number, number of the end).
Progress = Callable[[int, int, str], None]
_STAGES = ("load", "save", "head", "check", "done")  # what is lazy is computed in saving
_PARAMETERS = ("group_size", "bits", "mode")

#: What the check reads.
_TEXT = "In the beginning there was a sum.\n\ndef add(a, b):\n    return a + b\n" * 2


@dataclass(frozen=True)
class ConvertOptions:
    """What to make of a checkpoint. The first ten are those of `mlx_lm.convert`.

    quantize           the trunk, by q_bits, q_group_size, q_mode and quant_predicate
    dtype              float16, bfloat16 or float32, of what is not quantised, heads too. Without it
                       the trunk gets the one that its config names, and heads keep theirs.
    dequantize         trunk and heads
    mtp                keep the heads, or drop them as mlx-lm does
    mtp_from           take them from this checkpoint of the same model: a folder or hub name
    mtp_only           write nothing but the heads, a folder that `MTP.load` and mtp_from read
    mtp_q_*            any of them quantises the heads, independently of the trunk: affine (2, 3, 4,
                       5, 6 or 8 bits; 4 is the default), mxfp4, mxfp8 or nvfp4. Their projection
                       stays as it is: its two halves differ too much in scale.
    mtp_norms          how the source stores the norms of the heads, where it does not tell
    """

    quantize: bool = False
    q_group_size: int | None = None
    q_bits: int | None = None
    q_mode: str = "affine"
    dtype: str | None = None
    upload_repo: str | None = None
    revision: str | None = None
    dequantize: bool = False
    quant_predicate: Callable[..., bool | dict[str, Any]] | str | None = None
    trust_remote_code: bool = False
    mtp: Literal["keep", "drop"] = "keep"
    mtp_from: str | Path | None = None
    mtp_only: bool = False
    mtp_q_bits: int | None = None
    mtp_q_group_size: int | None = None
    mtp_q_mode: str | None = None
    mtp_norms: Norms | None = None

    def head_quantization(self) -> dict[str, Any] | None:
        """group_size, bits and mode of the heads, or None. ValueError for what MLX lacks."""
        asked: Any = (self.mtp_q_group_size, self.mtp_q_bits, self.mtp_q_mode)
        if asked == (None, None, None):
            return None
        trial = nn.QuantizedLinear(512, 32, False, asked[0], asked[1], asked[2] or "affine")
        return {name: getattr(trial, name) for name in _PARAMETERS}


@dataclass(frozen=True)
class ConvertReport:
    """What was written.

    bits_per_weight   of the trunk, None if only heads were written
    head              the heads as they are stored now, None if there are none
    agreement         share of positions of a short text at which the written heads propose what
                      those of the source do; None where there is nothing to compare
    notes             a line on each thing that is not as one might expect
    """

    folder: Path
    bits_per_weight: float | None
    head: HeadReport | None
    agreement: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """A checkpoint, none of whose tensors is read yet. `name`: the folder or hub name."""

    name: str
    folder: Path
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Converts a checkpoint, a folder or hub name, as `mlx_lm.convert` does, and keeps its heads.

    mlx_path    the folder to write; it must not exist, and does not if anything fails

    Raises ValueError for options that contradict each other, an existing `mlx_path`, heads that
    are to be quantised and are so already, or that `MTP.load` cannot read (mtp="drop" leaves them
    out); FileNotFoundError for a source, or heads that were asked for, that are not there;
    `DraftMismatchError` for heads of another model; RuntimeError if the heads that were written do
    not compute what those in memory do.
    """
    options, folder = options or ConvertOptions(), Path(mlx_path)
    _refuse(options, folder)

    def stage(name: str) -> None:
        if progress is not None:
            progress(_STAGES.index(name), len(_STAGES) - 1, name)

    stage("load")
    trusted: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    source = _load(str(hf_path), options.revision, trusted)
    heads, notes = _find_heads(source, options)
    trunk, bits, head, agreement = source.model, None, None, None
    with _all_or_nothing(folder) as partial:
        if not options.mtp_only:
            if heads not in (None, source.folder):
                source.config.update(_fields(heads, source.config))
            stage("save")
            bits = _write_trunk(source, options, partial)
            trunk, _ = utils.load_model(partial, lazy=True, **trusted)
        if heads is not None:
            stage("head")
            original, mtp = (MTP.load(heads, trunk, norms=options.mtp_norms) for _ in range(2))
            _change(mtp, options, notes)
            _write_heads(mtp, partial, heads if options.mtp_only else None)
            stage("check")
            written = MTP.load(partial, trunk)
            tokens = source.tokenizer.encode(_TEXT, add_special_tokens=False) or [*range(32)]
            agreement = _check([written, mtp, original], tokens, options.mtp_only, notes)
            head = written.report
    stage("done")
    if options.upload_repo is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            utils.upload_to_hub(str(folder), options.upload_repo)
    return ConvertReport(folder, bits, head, agreement, tuple(dict.fromkeys(notes)))


def _refuse(options: ConvertOptions, folder: Path) -> None:
    """Raises ValueError for what cannot come to a good end."""
    heads = options.head_quantization() or options.mtp_only or options.mtp_from is not None
    mixed, dtypes = isinstance(options.quant_predicate, str), MODEL_CONVERSION_DTYPES
    upload = options.upload_repo
    refused: dict[str, Any] = {
        f"{folder} exists already: remove it, or write to another --mlx-path": folder.exists(),
        "--quantize and --dequantize exclude each other": options.quantize and options.dequantize,
        "--quant-predicate needs --q-mode affine": mixed and options.q_mode != "affine",
        "--mtp drop goes with no other --mtp option": options.mtp == "drop" and heads,
        "--mtp-only needs --mtp-q-bits and the like, not -q": options.mtp_only and options.quantize,
        "--mtp-only goes with `hf upload`, not --upload-repo": options.mtp_only and upload,
        f"--dtype must be one of {', '.join(dtypes)}": options.dtype not in (None, *dtypes),
    }
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`: takes that name at the end of the block, or is removed."""
    made = [parent for parent in folder.parents if not parent.exists()]
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
            for parent in made:
                parent.rmdir()


def _load(name: str, revision: str | None, trusted: dict[str, Any]) -> _Source:
    """Loads the trunk lazily. Raises as `mlx_rewind.load` does."""
    loaded = load_checkpoint(
        name, revision=revision, tokenizer_config=trusted, lazy=True, **trusted
    )
    loaded.config.pop(RECORD, None)  # it is on the files of the source
    return _Source(name, *loaded)


def _find_heads(source: _Source, options: ConvertOptions) -> tuple[Path | None, list[str]]:
    """The folder with the heads to be written, if there are any, and notes.

    Raises as `MTP.load` does; ValueError if heads would be quantised twice.
    """
    if options.mtp == "drop":
        return None, []
    quantization = options.head_quantization()
    folder = source.folder if options.mtp_from is None else folder_of(options.mtp_from)
    if not (options.mtp_from or options.mtp_only or quantization):
        try:
            if checkpoint.find_heads(folder, source.model) is None:
                missing = head_is_missing(folder, source.model)
                return None, [missing] if missing else []
        except UnsupportedModelError as error:
            exists = getattr(source.model, "model_type", None) in REFUSED
            return None, [f"{error}; it is left out"] if exists else []
    _, report = load_heads(folder, source.model, options.mtp_norms)
    if quantization and report.quantization and not options.dequantize:
        raise ValueError(
            f"the head in {folder} is quantised already. Leave the --mtp-q options out to keep it, "
            "or take an unquantised one with --mtp-from."
        )
    unused = ", ".join(report.unused)
    return folder, [f"belong to no part of a head and are left out: {unused}"] if unused else []


def _fields(folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """What the config.json of `folder` says of heads, and the config `known` does not."""
    starts, configs = ("mtp_", "num_nextn_predict_"), (checkpoint.read_config(folder), known)
    found, known = ({**(each.get("text_config") or {}), **each} for each in configs)
    return {k: v for k, v in found.items() if k.startswith(starts) and k not in known}


def _write_trunk(source: _Source, options: ConvertOptions, folder: Path) -> float:
    """Writes what `mlx_lm.convert` does and returns bits per weight. Empties the model."""
    model, config = source.model, source.config
    size: Any = options.q_group_size
    predicate: Any = options.quant_predicate
    if isinstance(predicate, str):
        predicate = mixed_quant_predicate_builder(predicate, model, size)
    text = (config.get("text_config") or {}).get("dtype")
    name = options.dtype or config.get("torch_dtype") or text
    if name in MODEL_CONVERSION_DTYPES:
        _cast(model, getattr(mx, name), getattr(model, "cast_predicate", None))
    with contextlib.redirect_stdout(io.StringIO()):
        if options.quantize:
            how: Any = {"mode": options.q_mode, "quant_predicate": predicate}
            model, config = utils.quantize_model(model, config, size, options.q_bits, **how)
        if options.dequantize:
            for key in ("quantization", "quantization_config"):
                config.pop(key, None)
            model = utils.dequantize_model(model)
        bits_per_weight = float(utils.compute_bits_per_weight(model))
        utils.save(folder, source.folder, model, source.tokenizer, config)
        if not Path(source.name).expanduser().exists():
            utils.create_model_card(folder, source.name)
    return bits_per_weight


def _cast(module: Any, dtype: mx.Dtype, casts: Callable[[str], bool] | None) -> None:
    """Casts the floating-point parameters for which `casts` does not say no."""

    def cast(path: str, x: mx.array) -> mx.array:
        wanted = mx.issubdtype(x.dtype, mx.floating) and (casts is None or casts(path))
        return x.astype(dtype) if wanted else x

    module.update(tree_map_with_path(cast, module.parameters()))


def _change(mtp: MTP, options: ConvertOptions, notes: list[str]) -> None:
    """Dequantises, casts and quantises the heads as asked. Mutates them and `notes`."""
    casts, how = getattr(mtp.target, "cast_predicate", None), options.head_quantization()
    head: Any
    for head in mtp.heads:
        if options.dequantize:
            utils.dequantize_model(head)
        if options.dtype is not None:
            _cast(head, getattr(mx, options.dtype), casts)
        if how:
            left = _quantize(head, mtp.target, how)
            notes += [f"not quantised, no group divides them: {', '.join(left)}"] if left else []
        # A GPU may multiply a transposed view by another kernel than what will be read back.
        head.update(tree_map(mx.contiguous, head.parameters()))


def _quantize(head: Head, target: nn.Module, how: dict[str, Any]) -> list[str]:
    """Quantises a head but for its projection and what mlx-lm spares in the trunk, such as gates.

    Returns the paths of layers that stay as they are because the group size does not divide them.
    """
    predicate = getattr(target, "quant_predicate", None)
    layer = ".".join([*head.trunk.path, "layers.0."])  # a predicate may not know of other layers
    left: list[str] = []

    def of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path == "projection" or not hasattr(module, "to_quantized"):
            return False
        in_trunk = re.sub(r"^body\.layers\.\d+\.", layer, path)
        told = predicate(in_trunk, module) if predicate else True
        parameters = how if told is True else dict(told or {})
        if parameters and module.weight.shape[-1] % parameters.get("group_size", 64):
            left.append(path)
            return False
        return parameters

    nn.quantize(head, class_predicate=of)
    return left


def _write_heads(mtp: MTP, folder: Path, alone_from: Path | None) -> None:
    """Writes the heads beside a trunk, or alone, as they were in the checkpoint `alone_from`."""
    layers = checkpoint.num_layers(mtp.target)
    tensors: dict[str, mx.array] = {}
    quantization = {}
    head: Any
    for index, head in enumerate(mtp.heads):
        parameters: Any = tree_flatten(head.parameters())
        for path, tensor in parameters:
            part = path.removeprefix("body.")
            tensors[checkpoint.name_of(part, head.family, index, layers)] = tensor
        for path, module in head.named_modules():
            if "scales" in module:
                quantization[f"{index}.{path}"] = {k: getattr(module, k) for k in _PARAMETERS}
    config: dict[str, Any] = {
        "model_type": f"{checkpoint.family_of(mtp.target)[0]}_mtp",
        RECORD: {"norms": "converted", "quantization": quantization},
    }
    file = folder / checkpoint.SIDE_FOLDER / "weights.safetensors"
    if alone_from is not None:
        file = folder / "model.safetensors"
        sizes = mtp.heads[0].projection.weight.shape[0], mtp.embed.weight.shape[0], layers
        config |= zip(("hidden_size", "vocab_size", "num_hidden_layers"), sizes, strict=True)
        config |= _fields(alone_from, {})
    file.parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    file.with_name("config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")


def _check(mtps: list[MTP], ids: list[int], alone: bool, notes: list[str]) -> float | None:
    """The share of positions in a text at which heads as written propose what the source's do.

    mtps     the heads as written, in memory, and as they were in the source
    alone    there is no trunk to feed: heads read embeddings for states, and the share is None

    Raises RuntimeError unless the first two have the same logits to the bit.
    """
    first, target = mtps[0], Target(mtps[0].target)
    tokens = mx.array([ids]) % first.embed.weight.shape[0]
    target.watch(first.input)
    try:
        output: Any = None if alone else target(tokens, make_prompt_cache(target.model))
        states = first.embed(tokens) if alone else output.hidden
        found = [_logits(mtp, tokens, states) for mtp in mtps]
        mx.eval(found)
    except RuntimeError as error:  # as for experts in bfloat16 on a CPU: compare the tensors
        notes.append(f"not tried out, because this machine cannot compute it: {error}")
        trees: Any = [dict(tree_flatten(mtp.heads)) for mtp in mtps]
        found, alone = [[tree[name] for name in sorted(tree)] for tree in trees], True
    if not all(mx.array_equal(a, b, equal_nan=True) for a, b in zip(*found[:2], strict=True)):
        raise RuntimeError("written heads do not compute what those in memory do; please report it")
    if alone:
        return None
    written, original = (mx.concatenate(found[i]).argmax(axis=-1) for i in (0, 2))
    return int((written == original).sum()) / written.size


def _logits(mtp: MTP, tokens: mx.array, states: mx.array) -> list[mx.array]:
    """Logits of each head, [n - 1 - k, V], for `tokens` [1, n] and states [1, n, H]."""
    logits = []
    for k, head in enumerate(mtp.heads):
        after = mtp.embed(tokens[:, k + 1 :])
        state, normed = head(after, states[:, : after.shape[1]], head.make_cache())
        logits.append(mtp.logits(k, normed)[0])
        states = state if head.family.chained else states
    return logits
