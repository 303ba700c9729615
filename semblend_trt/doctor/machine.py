"""The card, what the kernels run as, and the memory that donors are to take."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.doctor.finding import Chapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding

_chapter = Chapter("machine")
_GIB = 1 << 30


def machine(settings: Settings | None) -> Iterator[Finding]:
    """Says what torch sees, and whether the memory that the settings ask for is there."""
    import torch

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(cards):
        card = torch.cuda.get_device_properties(index)
        told = f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / _GIB:.1f} GiB"
        yield _chapter.ok(f"CUDA device {index}: {told}", device=index, name=card.name, memory=card.total_memory)
    if not cards and any(Path("/dev").glob("nvidia[0-9]*")):
        yield _chapter.failed(f"this machine has an NVIDIA card, but torch {torch.__version__} sees none")
    elif not cards:
        yield _chapter.note("no CUDA device; models and kernels run on the CPU")
    yield _kernels(cards > 0)
    if settings is not None:
        yield from _memory(settings, [torch.cuda.get_device_properties(index).total_memory for index in range(cards)])


def _kernels(has_card: bool) -> Finding:
    has_triton = find_spec("triton") is not None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _chapter.note("TRITON_INTERPRET is 1: Triton kernels are interpreted, which is for tests alone")
    if has_card and has_triton:
        return _chapter.ok("kernels run as Triton kernels", kernels="triton")
    if has_card:
        return _chapter.note(
            "Triton is not installed: kernels run as PyTorch, much slower; install semblend-trt[gpu]", kernels="torch"
        )
    return _chapter.ok("kernels run as PyTorch", kernels="torch")


def _memory(settings: Settings, cards: list[int]) -> Iterator[Finding]:
    """Host memory is page-locked at the start where there is a card, and then has to be there at once."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.host_bytes > memory:
        told = f"SEMBLEND_HOST_BYTES is {settings.host_bytes}, and this machine has {memory} bytes of memory; lower it"
        yield _chapter.failed(told) if cards else _chapter.note(told)
    on_card = settings.device_bytes + settings.staging_bytes + settings.snapshot_bytes
    if cards and on_card > min(cards):
        yield _chapter.failed(
            f"SEMBLEND_DEVICE_BYTES, SEMBLEND_STAGING_BYTES and SEMBLEND_SNAPSHOT_BYTES are {on_card} together, and a "
            f"card here has {min(cards)} bytes; lower them"
        )
