"""Which BLAS computes MLX's float32 products on the CPU, and a start with OpenBLAS.

The BLAS of the mlx wheel on Linux takes K rows as K single rows, so no verify can pay there.
OpenBLAS does not, but has to be there when the process starts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_LIBRARY = "libopenblas.so.0"
_FOLDERS = ("/usr/lib", "/lib", "/usr/lib64", "/usr/local/lib")

#: glibc's malloc gives every large array back to the system and asks for it again.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}

ADVICE = (
    "OpenBLAS was not found, and the BLAS of the mlx wheel makes K float32 rows cost K single "
    "ones (Debian: apt-get install libopenblas0-pthread)"
)


@dataclass(frozen=True)
class Blas:
    """What computes float32 products.

    name      openblas, mkl, blis, accelerate, wheel (that of the mlx wheel), metal or cuda
    library   the file, where it is one
    threads   that OpenBLAS uses, None for the others
    """

    name: str
    library: str | None = None
    threads: int | None = None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread(s)"
        return f"{self.name}{threads}" + (f" ({self.library})" if self.library else "")


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def blas() -> Blas:
    """The BLAS of this process."""
    if mx.default_device() != mx.Device(mx.cpu):
        return Blas("metal" if mx.metal.is_available() else "cuda")
    if sys.platform == "darwin":
        return Blas("accelerate")
    process = ctypes.CDLL(None)
    try:
        product = process.cblas_sgemm
    except AttributeError:  # nothing was preloaded: mlx finds its own
        return Blas("wheel")
    info = _SymbolInfo()
    process.dladdr(ctypes.cast(product, ctypes.c_void_p), ctypes.byref(info))
    file = (info.file or b"").decode()
    name = next((name for name in ("openblas", "mkl", "blis") if name in file), "preloaded")
    try:
        return Blas(name, file, int(process.openblas_get_num_threads()))
    except AttributeError:
        return Blas(name, file)


def find_openblas(folders: Sequence[str] = _FOLDERS) -> str | None:
    """Where Debian's libopenblas0-pthread, or another one, puts it."""
    found = (
        path
        for folder in folders
        for pattern in (_LIBRARY, f"*/{_LIBRARY}")
        for path in sorted(Path(folder).glob(pattern))
    )
    return next((str(path) for path in found), None)


def preloaded(environment: Mapping[str, str], library: str | None) -> dict[str, str]:
    """`environment` with malloc set for large arrays, and the library before all others."""
    changed = {"OPENBLAS_NUM_THREADS": "1", **environment, **_MALLOC}
    if library is not None:
        changed["LD_PRELOAD"] = " ".join(filter(None, (library, environment.get("LD_PRELOAD"))))
    return changed


def restart(arguments: Sequence[str]) -> None:
    """Replaces this process by `python arguments...` under OpenBLAS and malloc's settings.

    Returns without effect where that is no gain: on other systems than Linux, and on GPUs.
    """
    if sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        return
    library = find_openblas()
    if library is None:
        print(f"mlx-rewind: note: {ADVICE}", file=sys.stderr)
    sys.stdout.flush()
    command = [sys.executable, *arguments]
    os.execve(sys.executable, command, preloaded(os.environ, library))
