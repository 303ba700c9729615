"""Write documents, and show complaints and a progress bar."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from semblend_trt.command_line import printable
from semblend_trt.files import check_writable, write_bytes


def beside(path: Path, suffix: str) -> Path | None:
    """Return the path with another suffix; None for a device or pipe. Raises ConfigurationError if not writable."""
    check_writable(path)
    return None if path.exists() and not path.is_file() else path.with_suffix(suffix)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; NaN and infinities, which JSON does not have, become null."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def complain(sentence: str) -> None:
    """Show one line on stderr."""
    sys.stderr.write(printable(f"validation: {sentence}") + "\n")


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a transient progress bar of `steps` steps on stderr; give the function that says what was done last."""
    with tqdm(total=steps, desc=title, leave=False, file=sys.stderr, disable=None) as bar:

        def on_step(last: str) -> None:
            bar.set_postfix_str(printable(last), refresh=False)
            bar.update()

        yield on_step
