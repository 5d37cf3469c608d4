"""A store in a folder: one safetensors file per node of its trees, each with a manifest.

    NAME.safetensors    metadata   manifest: what the entry belongs to, and what must be in the file
                        tokens     all tokens up to the node's end
                        page.G.I   keys and values of growing cache G, of the node's own tokens
                        state.F.S  array S of the F-th cache that cannot be cut, at a boundary

A file is written under another name and then renamed. A node counts only together with all that
come before it, so a reader may see any mixture of old and new files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .fingerprint import raw
from .radix import Node, token_array
from .snapshot import LeafKind, Pages, State, cut
from .space import Space, SpaceKey

FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{40}\.safetensors")
_HEADER_LENGTH = 8


@dataclass(frozen=True)
class LoadReport:
    """What came of a folder: boundaries taken in, and why the other files were not used.

    nodes    those that were taken in, parents first
    """

    entries: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    nodes: tuple[Node, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Owner:
    """Whose entries may be used.

    model         fingerprint of the target
    unused        labels of its caches that stay empty
    tokenizer     fingerprint of its tokenizer, None if it is not checked
    """

    model: str
    unused: frozenset[str]
    tokenizer: str | None


class _RefusedError(ValueError):
    """Why a file cannot be used."""


# -- saving ---------------------------------------------------------------------------------------


def save_nodes(folder: Path, spaces: Iterable[Space], owner: Owner) -> int:
    """Makes a folder hold these spaces and no others. Returns the number of files written."""
    folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    written = 0
    for space in spaces:
        for node in space.tree:
            if node.parent is None:
                continue
            arrays, manifest = _contents(space.key, node, owner)
            name = f"{_digest(arrays, manifest)[:40]}.safetensors"
            names.add(name)
            if not (folder / name).exists():
                _write(folder / name, arrays, manifest)
                written += 1
    for path in folder.glob("*.safetensors"):
        if _NAME.fullmatch(path.name) and path.name not in names:
            path.unlink(missing_ok=True)
    return written


def _contents(key: SpaceKey, node: Node, owner: Owner) -> tuple[dict[str, mx.array], Any]:
    arrays = {"tokens": mx.array(node.tokens.tolist(), mx.uint32)}
    for g, pages in enumerate(node.pages):
        arrays.update({f"page.{g}.{i}": x for i, x in enumerate(pages)})
    states = () if node.boundary is None else node.boundary.states
    for f, state in enumerate(states):
        arrays.update({f"state.{f}.{name}": x for name, x in state.arrays.items()})
    manifest = {
        "format": FORMAT,
        "mlx_lm": version("mlx-lm"),
        "role": "target" if key.model == owner.model else "draft",
        "model": key.model,
        "tokenizer": owner.tokenizer,
        "kinds": [[kind.label, kind.name, dict(kind.settings)] for kind in key.kinds],
        "kv_bits": next((kind.bits for kind in key.kinds if kind.bits), None),
        "quantized_at": key.quantized_at,
        "start": node.start,
        "end": node.end,
        "is_boundary": node.boundary is not None,
        "numbers": [state.numbers for state in states],
        "coverage": _coverage(key, node),
        "arrays": {name: [str(x.dtype), list(x.shape)] for name, x in arrays.items()},
    }
    return arrays, {**manifest, "checksum": _digest(arrays, manifest)}


def _coverage(key: SpaceKey, node: Node) -> dict[str, list[int]]:
    """Tokens of each cache that the file has something of: from, to."""
    pages = iter(node.pages)
    covered = {}
    for kind in key.kinds:
        if kind.is_growing:
            covered[kind.label] = [node.start, node.end if next(pages) else node.start]
        elif node.boundary is not None:
            covered[kind.label] = [0, node.end]
    return covered


def _write(path: Path, arrays: dict[str, mx.array], manifest: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp.safetensors")
    try:
        mx.save_safetensors(str(draft), arrays, {"manifest": json.dumps(manifest)})
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _digest(arrays: dict[str, mx.array], manifest: dict[str, Any]) -> str:
    """Of everything that a file holds but the checksum itself."""
    told = {name: value for name, value in manifest.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(arrays):
        x = arrays[name]
        digest.update(name.encode())
        digest.update(raw(x))
    return digest.hexdigest()


# -- loading --------------------------------------------------------------------------------------


def load_nodes(folder: Path, spaces: dict[SpaceKey, Space], owner: Owner) -> LoadReport:
    """Adds the nodes of a folder to the spaces. Nothing of a refused file is used."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no store at {folder}")
    refused: dict[str, str] = {}
    manifests: dict[Path, Any] = {}
    for path in sorted(folder.glob("[!.]*.safetensors")):
        with _noting(refused, path.name):
            manifests[path] = _manifest(path)
            _check_owner(manifests[path], owner)
    nodes: list[Node] = []
    usable = (path for path in manifests if path.name not in refused)
    for path in sorted(usable, key=lambda path: manifests[path]["start"]):
        with _noting(refused, path.name):
            nodes += _add(path, manifests[path], spaces, owner)
    entries = sum(node.boundary is not None for node in nodes)
    return LoadReport(entries, refused, tuple(nodes))


@contextmanager
def _noting(refused: dict[str, str], name: str) -> Iterator[None]:
    """Notes why a file is refused, or that it went away meanwhile."""
    try:
        yield
    except FileNotFoundError:
        refused[name] = "it went away meanwhile"
    except (_RefusedError, OSError) as reason:
        refused[name] = str(reason)


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a file that is whole by its length. Reads the header only."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        total = path.stat().st_size
        if not 0 < size <= total - _HEADER_LENGTH:
            raise _RefusedError("truncated: the header is not whole")
        try:
            header = json.loads(file.read(size))
            manifest: dict[str, Any] = json.loads(header.pop("__metadata__")["manifest"])
            ends = [entry["data_offsets"][1] for entry in header.values()]
            expected = {"format", "role", "model", "start", "end", "arrays", "checksum"}
            missing = expected - manifest.keys()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _RefusedError(f"not an entry of a store: {error!r}") from error
    if missing:
        raise _RefusedError(f"not an entry of a store: its manifest lacks {sorted(missing)}")
    end = _HEADER_LENGTH + size + max(ends, default=0)
    if total != end:
        raise _RefusedError(f"truncated: {total} bytes, expected {end}")
    return manifest


def _check_owner(manifest: dict[str, Any], owner: Owner) -> None:
    """Refuses the entry of another format, library, model or tokenizer."""
    expected = {"format": FORMAT, "mlx_lm": version("mlx-lm")}
    if manifest["role"] == "target":
        expected["model"] = owner.model
    if owner.tokenizer is not None and manifest.get("tokenizer") is not None:
        expected["tokenizer"] = owner.tokenizer
    for name, value in expected.items():
        got = manifest.get(name)
        if got != value:
            raise _RefusedError(f"it is of another {name}: got {got}, expected {value}")


def _add(
    path: Path, manifest: dict[str, Any], spaces: dict[SpaceKey, Space], owner: Owner
) -> list[Node]:
    """Reads one file and adds its node. Returns none if the tree has it already."""
    arrays = _read(path, manifest)
    try:
        key = SpaceKey(
            manifest["model"],
            tuple(LeafKind(label, name, tuple(s.items())) for label, name, s in manifest["kinds"]),
            manifest["quantized_at"],
        )
        pages, states = _parts(key, manifest, arrays, owner)
        tokens: Any = arrays["tokens"].tolist()
        ids, start, end = token_array(tokens), manifest["start"], manifest["end"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _RefusedError(f"its manifest does not fit its contents: {error!r}") from error
    if len(ids) != end or not 0 <= start < end:
        raise _RefusedError(f"it says tokens {start}..{end} and has {len(ids)}")
    space = spaces.get(key) or Space(key)
    _, depth = space.tree.match(ids)
    if depth < start:
        raise _RefusedError(f"its beginning is missing: tokens {depth}..{start} are in no file")
    rest = [cut(part, depth - start, end - start) if depth > start else part for part in pages]
    spaces[key] = space
    if manifest["is_boundary"]:
        known = space.tree.find(ids)
        if known is not None and known.boundary is not None:
            return []
        return [space.add(ids, depth, rest, states)]
    return [space.tree.add(ids, depth, tuple(rest))] if depth < end else []


def _read(path: Path, manifest: dict[str, Any]) -> dict[str, mx.array]:
    try:
        arrays: Any = mx.load(str(path))
        mx.eval(arrays)
    except RuntimeError as error:
        path.stat()  # says so if it went away
        raise _RefusedError(f"it cannot be read: {error}") from error
    found = {name: [str(x.dtype), list(x.shape)] for name, x in arrays.items()}
    if found != manifest["arrays"]:
        odd = sorted(found.keys() ^ manifest["arrays"].keys()) or "other shapes or types"
        raise _RefusedError(f"it does not hold what its manifest says: {odd}")
    if _digest(arrays, manifest) != manifest["checksum"]:
        raise _RefusedError("damaged: its contents have another checksum")
    return dict(arrays)


def _parts(
    key: SpaceKey, manifest: dict[str, Any], arrays: dict[str, mx.array], owner: Owner
) -> tuple[list[Pages], list[State]]:
    """The pages and states of a file. Refuses one that covers only some caches."""
    tokens = manifest["end"] - manifest["start"]
    pages: list[Pages] = []
    states: list[State] = []
    for kind in key.kinds:
        if kind.is_growing:
            count, g = 6 if kind.bits else 2, len(pages)
            part = tuple(arrays[f"page.{g}.{i}"] for i in range(count) if f"page.{g}.0" in arrays)
            is_unused = key.model != owner.model or kind.label in owner.unused
            if any(x.shape[2] != tokens for x in part) or not (part or is_unused):
                raise _RefusedError(f"half-empty: cache {kind.label} lacks some of {tokens} tokens")
            pages.append(part)
        elif manifest["is_boundary"]:
            prefix = f"state.{len(states)}."
            own = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
            if not own:
                raise _RefusedError(f"half-empty: nothing of cache {kind.label} is there")
            states.append(State(own, manifest["numbers"][len(states)]))
    return pages, states
