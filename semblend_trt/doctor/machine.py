"""The cards, how the kernels run, and the memory that donors need."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.doctor.finding import Area

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding
    from semblend_trt.doctor.model import KnownModel

_area = Area("machine")
_GIB = 1 << 30
# Of control groups, version 2 and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine(settings: Settings | None) -> Iterator[Finding]:
    """Whether torch sees the cards, and whether there is the memory that the settings ask for."""
    import torch

    cards = _cards()
    for index, card in enumerate(cards):
        text = f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / _GIB:.1f} GiB"
        yield _area.ok(f"CUDA device {index}: {text}", device=index, name=card.name, memory=card.total_memory)
    if not cards and any(Path("/dev").glob("nvidia[0-9]*")):
        yield _area.failed(f"this machine has an NVIDIA card, but torch {torch.__version__} sees none")
    elif not cards:
        yield _area.note("no CUDA device; models and kernels run on the CPU")
    yield _kernels(bool(cards))
    if settings is not None:
        yield from _memory(settings)


def _kernels(has_card: bool) -> Finding:
    has_triton = find_spec("triton") is not None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _area.note("TRITON_INTERPRET is 1: Triton kernels are interpreted, which is for tests alone")
    if has_card and has_triton:
        return _area.ok("kernels run as Triton kernels", kernels="triton")
    if has_card:
        return _area.note(
            "Triton is not installed: kernels run as PyTorch, much slower; install semblend-trt[gpu]", kernels="torch"
        )
    return _area.ok("kernels run as PyTorch", kernels="torch")


def pool(llm_args: Any, known: KnownModel) -> Iterator[Finding]:
    """Whether the KV pool that the engine's options ask for fits into a card, or without one into host memory."""
    tokens = getattr(getattr(llm_args, "kv_cache_config", None), "max_tokens", None)
    ranks = getattr(llm_args, "tensor_parallel_size", None) or 1
    if tokens is None or known.dtype is None or not isinstance(ranks, int):
        return
    if not isinstance(tokens, int) or tokens < 1:
        yield _area.failed(f"kv_cache_config.max_tokens is {tokens!r}; give a whole number from 1 on")
        return
    size, cards = tokens * known.geometry(ranks).bytes_per_token(known.dtype), _cards()
    memory = min((card.total_memory for card in cards), default=_host_memory())
    if size > memory:
        place = "a card here" if cards else "this machine"
        text = f"kv_cache_config.max_tokens {tokens} are {size} bytes of KV a rank, and {place} has {memory}; lower it"
        yield _area.failed(text) if cards else _area.note(text)


def _memory(settings: Settings) -> Iterator[Finding]:
    """With a card, host memory is page-locked at the start and must be there at once. Without one all tiers are host
    memory."""
    cards, memory = _cards(), _host_memory()
    on_host = {"HOST_BYTES": settings.host_bytes}
    on_card = {"DEVICE_BYTES": settings.device_bytes, "SNAPSHOT_BYTES": settings.snapshot_bytes}
    if cards:
        yield from _too_much(
            on_card | {"STAGING_BYTES": settings.staging_bytes},
            min(card.total_memory for card in cards),
            "a card here",
            _area.failed,
        )
        yield from _too_much(on_host, memory, "this machine", _area.failed)
    else:
        yield from _too_much(on_host | on_card, memory, "this machine", _area.note)


def _too_much(sizes: dict[str, int], memory: int, place: str, finding: Callable[[str], Finding]) -> Iterator[Finding]:
    total, given = sum(sizes.values()), {name: size for name, size in sizes.items() if size}
    if total > memory:
        names = ", ".join(f"SEMBLEND_{name} ({size})" for name, size in given.items())
        yield finding(f"{place} has {memory} bytes of memory, and {total} are asked for by {names}; lower them")


def _cards() -> list[Any]:
    """Torch's properties of each card."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(index) for index in range(count)]


def _host_memory() -> int:
    """Bytes of memory: the machine's, or less where the container's limit is lower."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # version 2 says "max" for none
            found.append(int(limit.read_text()))
    return min(found)
