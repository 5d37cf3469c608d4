"""`mlx-rewind convert`."""

from __future__ import annotations

from typing import Any


def add_to(commands: Any) -> None:
    pass
