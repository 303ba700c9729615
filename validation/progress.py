"""A progress bar on stderr that leaves nothing behind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import rich.progress as bars

from semblend_trt.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console


@contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Shows `steps` steps and gives the function that reports one of them, with the name of what is done."""
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[last]}", markup=False),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=steps, last="")
        yield lambda last: bar.update(task, advance=1, last=printable(last))
