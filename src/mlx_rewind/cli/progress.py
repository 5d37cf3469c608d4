"""Progress bars of long work, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

#: (done, total), and the stage if it has another name by now
Report = Callable[..., None]


@contextmanager
def progress_bar(name: str, *, ends_full: bool = False) -> Iterator[Report | None]:
    """Yields report(done, total, stage=None); None where nobody looks. The bar is gone at the end.

    ends_full    the bar goes when it is full, before the end of the block
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def report(done: int, total: int, stage: str | None = None) -> None:
            bar.update(task, description=stage or name, completed=done, total=total)
            if ends_full and done == total:
                bar.stop()

        yield report
