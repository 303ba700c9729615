"""Who speaks for this process: its worker id and its generation."""

from __future__ import annotations

import functools
import os
import re
import socket
import time

_MOST = (1 << 53) - 1


def worker_id_of(setting: int | None, host_name: str | None = None) -> int:
    """The worker id: the setting, else the number behind the last hyphen of the host's name, else 0."""
    if setting is not None:
        return setting
    label = (socket.gethostname() if host_name is None else host_name).split(".")[0]
    found = re.search(r"-([0-9]{1,16})$", label)
    return min(int(found[1]), _MOST) if found else 0


def generation() -> int:
    """This process's generation: microseconds since 1970 when it was first asked for, so that a restart's is higher."""
    return _generation_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _generation_of(process: int) -> int:  # noqa: ARG001 - a forked child speaks for itself
    return time.time_ns() // 1000
