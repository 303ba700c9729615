"""The folder in which prometheus_client keeps the counts of several processes (PROMETHEUS_MULTIPROC_DIR)."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_ROOM = 1 << 17  # of the files for counters and histograms as they begin


@functools.cache
def count_here_where_unwritable() -> None:
    """Call it before the first series. Where the folder cannot be used, the process counts for itself from then on: its
    own files there would end it, or its start. Raises nothing, and warns once.

    Facts: prometheus_client, `values.py` and `mmap_dict.py` (0.20 to 0.26).
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return
    from prometheus_client import values
    from prometheus_client.mmap_dict import MmapedDict

    try:
        with tempfile.TemporaryFile(dir=folder or ".") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)  # a file that is mapped ends the process on a full disk
        # A process of this number may have left files that cannot be read.
        for path in (Path(folder, f"{kind}_{os.getpid()}.db") for kind in ("counter", "histogram")):
            if path.exists():
                MmapedDict(str(path)).close()  # type: ignore[no-untyped-call]
    except Exception as error:
        logger.warning("PROMETHEUS_MULTIPROC_DIR is %r, where this process cannot count: %s", folder, error)
        values.ValueClass = values.MutexValue
