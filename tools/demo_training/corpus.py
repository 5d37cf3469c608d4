"""Public texts from Debian packages, cut into documents; every 25th or so is held out.

The packages are downloaded and unpacked into the work directory; nothing is installed.
"""

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES = (
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "python3.11-doc",
    "bible-kjv",
    "bible-kjv-text",
    "r-cran-janeaustenr",
)
HELD_OUT_ONE_IN = 25
SHORTEST_DOCUMENT = 400
VERSE = re.compile(r"^(\d?[A-Za-z]+?)(\d+):(\d+) (.*)$")
CHAPTER_HEADING = re.compile(r"(?im)^(?=chapter [0-9ivxlc]+\.?\s*$)")


@dataclass(frozen=True)
class Document:
    """One text; `kind` is code, docs or prose, `name` is unique."""

    kind: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % HELD_OUT_ONE_IN == 0


def build(work: Path) -> None:
    """Write `documents.jsonl` into the work directory."""
    root = unpack_packages(work / "packages")
    sources = (standard_library(root), documentation(root), austen(root), king_james(root))
    documents = [d for source in sources for d in source if len(d.text) >= SHORTEST_DOCUMENT]
    with (work / "documents.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in documents)
    for kind in ("code", "docs", "prose"):
        chosen = [d for d in documents if d.kind == kind]
        size = sum(len(d.text) for d in chosen) / 1e6
        held_out = sum(d.held_out for d in chosen)
        print(f"corpus: {kind:5} {len(chosen):5} documents, {held_out:3} held out, {size:.1f} MB")


def load(work: Path) -> list[Document]:
    with (work / "documents.jsonl").open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def unpack_packages(folder: Path) -> Path:
    """Download the Debian packages that are missing and unpack all; returns the root."""
    root = folder / "root"
    if root.exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SystemExit("the corpus comes from Debian packages: run this stage on Debian")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    partial = folder / "partial"
    for archive in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
    return partial.rename(root)


def standard_library(root: Path) -> Iterator[Document]:
    library = root / "usr/lib/python3.11"
    for path in sorted(library.rglob("*.py")):
        name = str(path.relative_to(library))
        if "test" in name or name.startswith(("pydoc_data", "encodings", "idlelib")):
            continue
        yield Document("code", name, path.read_text(encoding="utf-8", errors="replace"))


def documentation(root: Path) -> Iterator[Document]:
    sources = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(sources.rglob("*.rst.txt")):
        yield Document("docs", str(path.relative_to(sources)), path.read_text(encoding="utf-8"))


def king_james(root: Path) -> Iterator[Document]:
    """One document per chapter, a verse a line, printed by the package's own reader."""
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    chapters: dict[str, list[str]] = {}
    for line in printed.stdout.splitlines():
        if match := VERSE.match(line):
            book, chapter, verse, text = match.groups()
            chapters.setdefault(f"{book} {chapter}", []).append(f"{chapter}:{verse} {text}")
    for name, verses in chapters.items():
        yield Document("prose", f"King James Bible, {name}", "\n".join(verses) + "\n")


def austen(root: Path) -> Iterator[Document]:
    """One document per chapter, paragraphs joined to one line each."""
    database = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    for lines in r_string_vectors(database.read_bytes()):
        title = next(line for line in lines if line).strip().title()
        chapters = CHAPTER_HEADING.split("\n".join(lines))
        for number, chapter in enumerate(chapters[1:], 1):
            paragraphs = re.split(r"\n\s*\n", chapter.strip())
            text = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
            yield Document("prose", f"{title}, chapter {number}", text + "\n")


def r_string_vectors(database: bytes) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database.

    A record is its uncompressed size in 4 bytes, then a zlib stream; inside is R's serialisation
    (R Internals, section 1.8), of which only character vectors are read.
    """
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        record = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        yield list(r_strings(record))


def r_strings(record: bytes) -> Iterator[str]:
    """Strings of one serialised character vector, version 3, big endian."""
    (encoding_length,) = struct.unpack_from(">i", record, 14)
    at = 18 + encoding_length
    _flags, count = struct.unpack_from(">ii", record, at)
    at += 8
    for _ in range(count):
        _flags, length = struct.unpack_from(">ii", record, at)
        at += 8
        yield record[at : at + max(length, 0)].decode("utf-8")
        at += max(length, 0)
