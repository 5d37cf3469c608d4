"""Heads on disk: where they are, what their tensors are called, how their norms are stored.

Only headers are read here; the tensors stay on disk until a head is computed with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache as memoize
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..errors import DraftMismatchError, UnsupportedModelError
from .families import COPY, FAMILIES, REFUSED, Family

#: How the norm weights of a head are stored: minus one, or as they are used.
Norms = Literal["raw", "converted"]

#: The folder in a converted checkpoint that holds its heads, and the key of config.json under
#: which the converter recorded how they are stored.
SIDE_FOLDER, RECORD = "mtp", "mlx_rewind_mtp"

_TRUNK_FILE = re.compile(r"model(\.safetensors)?(-\d+-of-\d+)?\.safetensors")
_RAW_NAME = re.compile(r"\.layers\.\d+\.moe\.")
_DOWNLOADED = [*DEFAULT_ALLOW_PATTERNS, "*mtp*.safetensors", f"{SIDE_FOLDER}/*"]


@dataclass
class Stored:
    """The tensors of a checkpoint's heads, as they are called there.

    tensors        name -> array, not read yet
    parts          name -> (part of `Head` or COPY, index of the head or None for all of them)
    files          name -> file, relative to the folder
    formats        file -> the `format` in its safetensors header, None without one
    unused         names under the root of a head that belong to no part of it
    trunk_is_raw   whether the trunk in the same folder is as its authors stored it
    """

    folder: Path
    family: Family
    config: dict[str, Any]
    tensors: dict[str, mx.array] = field(default_factory=dict)
    parts: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str | None] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    trunk_is_raw: bool = False

    @property
    def heads(self) -> int:
        return 1 + max((i for _, i in self.parts.values() if i is not None), default=0)

    @property
    def layout(self) -> str:
        if _is_head(self.config):
            return "separate"
        embedded = all(_TRUNK_FILE.fullmatch(file) for file in self.files.values())
        return "embedded" if embedded else "side file"

    @property
    def record(self) -> dict[str, Any]:
        """What the converter of the heads noted; {} if nothing."""
        folder = self.folder
        if any(file.startswith(f"{SIDE_FOLDER}/") for file in self.files.values()):
            folder = folder / SIDE_FOLDER
        record: dict[str, Any] = read_config(folder).get(RECORD) or {}
        return record

    def norms(self, asked: Norms | None) -> str:
        """raw, converted, or plain for a family that stores norms as they are used.

        Decided by what cannot mislead: the converter's record, or a raw trunk that the head was
        stored with. Raises ValueError, naming a tensor, where there is neither.
        """
        told = asked if asked is not None else self.record.get("norms")
        if told not in (None, "raw", "converted"):
            raise ValueError(f"norms of an MTP head are raw or converted, got {told!r}")
        if not self.family.shifted:
            return "plain"
        if told is not None:
            return str(told)
        written = {self.formats[file] for file in self.files.values()}
        if self.layout == "embedded":
            if self.trunk_is_raw:
                return "raw"
        elif written == {"pt"} or (self.trunk_is_raw and written == {None}):
            return "raw"
        norm = next(name for name in sorted(self.tensors) if is_norm(name))
        raise ValueError(
            f"cannot tell how {norm} in {self.folder / self.files[norm]} is stored: minus one, as "
            "the authors do, or as it is used. Neither a raw trunk beside it nor a record of a "
            'converter says so. Decide with --mtp-norms raw|converted (norms="..." in Python).'
        )

    def of_head(self, index: int) -> dict[str, mx.array]:
        """Part of `Head` -> tensor."""
        found: dict[str, mx.array] = {}
        names: dict[str, str] = {}
        for name, (part, i) in self.parts.items():
            if part == COPY or i not in (None, index):
                continue
            if part in found:
                a, b = (f"{n} ({self.files[n]})" for n in (names[part], name))
                raise ValueError(f"{self.folder} holds the same part of a head twice: {a} and {b}")
            found[part], names[part] = self.tensors[name], name
        return found

    def names_of(self, part: str, index: int | None = None) -> list[str]:
        """What a part is called; of head `index`, or of any."""
        return [
            name
            for name, (of, i) in self.parts.items()
            if of == part and (index is None or i in (None, index))
        ]


def is_norm(name: str) -> bool:
    """Whether a tensor is the weight of a norm."""
    *_, module, kind = ["", *name.split(".")]
    return kind == "weight" and "norm" in module


def family_of(target: nn.Module) -> tuple[str, Family]:
    """The target's model file in mlx-lm and its family of heads.

    Raises `UnsupportedModelError` for one whose head is not known, or cannot be used.
    """
    name = type(target).__module__.rpartition(".")[2]
    if name in REFUSED:
        raise UnsupportedModelError(f"the MTP head of a {name} cannot be used: {REFUSED[name]}")
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"no MTP head is known for model type {name} (known: {known}). Use another drafter."
        )
    return name, FAMILIES[name]


def folder_of(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded with its side files if it is a hub name.

    Raises FileNotFoundError for a path or name that leads nowhere.
    """
    name = str(path_or_hf_repo)
    folder = Path(name).expanduser()
    if folder.is_file():
        raise FileNotFoundError(f"{name} is a file; give the folder that it is in")
    if folder.exists():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no model at {name}: the folder does not exist")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_DOWNLOADED))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"cannot load {name}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, {} if there is none. Raises ValueError for one that is malformed."""
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return config


def is_separate_head(folder: Path) -> bool:
    """Whether a folder holds heads by themselves, without the trunk."""
    return _is_head(read_config(folder))


def _is_head(config: dict[str, Any]) -> bool:
    return str(config.get("model_type", "")).endswith("_mtp")


def announced(config: dict[str, Any], family: Family) -> int | None:
    """How many heads a config.json says there are; None if it says nothing."""
    for fields in (config, config.get("text_config", {})):
        for name in family.count:
            if isinstance(fields.get(name), int):
                return int(fields[name])
    return None


def find_heads(folder: Path, target: nn.Module) -> Stored | None:
    """Looks for the heads of `target` in a folder; None if there are none.

    Raises as `family_of` does, `DraftMismatchError` for a separate head of another model type.
    """
    name, family = family_of(target)
    config = read_config(folder)
    kind = str(config.get("model_type", ""))
    if kind.endswith("_mtp") and FAMILIES.get(kind.removesuffix("_mtp")) is not family:
        raise DraftMismatchError(
            f"{folder} holds a head of type {kind}; a {name} target needs one of type {name}_mtp"
        )
    stored = Stored(folder, family, config)
    for file in _files(folder, config):
        _add(stored, file, num_layers(target))
    return stored if stored.parts else None


def num_layers(target: nn.Module) -> int:
    """Layers of the trunk: the index of the first NextN layer."""
    return len(target.layers)


def names_of_heads(names: Iterable[str], family: Family, layers: int) -> set[str]:
    """Those that belong to heads, of all tensors of a checkpoint whose trunk has `layers`.

    A layer behind the trunk's is a head's only if it has a projection.
    """
    parts = {name: part for name in names if (part := _part(name, family, layers, bare=False))}
    if not any("{n}" in root for root in family.roots):
        return set(parts)
    heads = {index for part, index in parts.values() if part == "projection.weight"}
    return {name for name, (_, index) in parts.items() if index in heads}


def name_of(part: str, family: Family, index: int, layers: int) -> str:
    """What a part of head `index` is called in a checkpoint whose trunk has `layers`."""
    starts = [(to, name) for name, to in family.names.items() if part.startswith(to)]
    to, name = max(starts, key=lambda start: len(start[0]))  # the first of equals
    return (family.roots[0] + name).format(n=layers + index, i=index) + part.removeprefix(to)


def _files(folder: Path, config: dict[str, Any]) -> Iterator[Path]:
    yield from sorted(folder.glob("*.safetensors"))
    yield from sorted((folder / SIDE_FOLDER).glob("*.safetensors"))
    extra = config.get("mlx_lm_extra_tensors")  # noted by OptiQ and MTPLX
    named = extra.get("mtp_file") if isinstance(extra, dict) else None
    outside = isinstance(named, str) and Path(named).parts[:-1] not in ((), (SIDE_FOLDER,))
    if outside and (folder / str(named)).is_file() and ".." not in Path(str(named)).parts:
        yield folder / str(named)


def _add(stored: Stored, path: Path, layers: int) -> None:
    """Takes what a file holds of the heads."""
    file = path.relative_to(stored.folder).as_posix()
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    tensors, metadata = loaded
    of_trunk = _TRUNK_FILE.fullmatch(file) is not None
    bare = stored.layout == "separate"
    for name, tensor in tensors.items():
        part = _part(name, stored.family, layers, bare)
        if part is None:
            stored.trunk_is_raw |= of_trunk and _is_raw(name, tensor)
        elif part[0] is None:
            stored.unused.append(name)
        elif name in stored.parts:
            raise ValueError(
                f"{stored.folder} holds {name} twice: in {stored.files[name]} and in {file}"
            )
        else:
            stored.tensors[name], stored.parts[name] = tensor, (part[0], part[1])
            stored.files[name] = file
            stored.formats[file] = metadata.get("format")


def _is_raw(name: str, tensor: mx.array) -> bool:
    """Whether a tensor of a trunk has a layout that mlx-lm's conversion changes."""
    if _RAW_NAME.search(name):
        return True
    return name.endswith("conv1d.weight") and ".layers." in name and tensor.shape[-1] != 1


def _part(
    name: str, family: Family, layers: int, bare: bool
) -> tuple[str | None, int | None] | None:
    """(part of `Head`, index of the head) of a tensor, None if it is none of a head's."""
    for pattern, part in _patterns(family.roots, tuple(family.names.items()), bare):
        match = pattern.match(name)
        if match is None:
            continue
        found = match.groupdict()
        index = int(found["i"]) if found.get("i") else None
        if found.get("n"):
            index = int(found["n"]) - layers
            if index < 0:
                return None
        return (part + name[match.end() :] if part not in (None, COPY) else part), index
    return None


@memoize
def _patterns(
    roots: tuple[str, ...], names: tuple[tuple[str, str], ...], bare: bool
) -> list[tuple[re.Pattern[str], str | None]]:
    """What a name of a head begins with, the most special first -> the part that it is."""
    roots = (*roots, "") if bare else roots
    starts: list[tuple[str, str | None]] = [
        (root + name, part) for root in roots for name, part in names
    ]
    starts += [(root, None) for root in roots if root]
    starts.sort(key=lambda start: len(start[0]), reverse=True)

    def compiled(start: str) -> re.Pattern[str]:
        text = re.escape(start).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{i\}", r"(?P<i>\d+)")
        return re.compile(text)

    return [(compiled(start), part) for start, part in starts]
