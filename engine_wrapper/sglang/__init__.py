"""SemBlend inside SGLang, as its plugin: `--radix-cache-backend semblend`.

SGLang calls `activate` in each of its processes, by the entry point `sglang.srt.plugins` (0.5.23,
`srt/plugins/__init__.py`). That names the backend and changes nothing; only who asks for it gets it."""

from __future__ import annotations

from importlib import import_module

BACKEND = "semblend"


def activate() -> None:
    """Register the backend. Raises nothing: an SGLang of another version goes on without it."""
    try:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    except ImportError:
        return
    if BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(
            BACKEND, lambda context: import_module(f"{__name__}.radix_cache").cache_of(context)
        )
