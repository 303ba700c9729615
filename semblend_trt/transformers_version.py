"""Whether the embedded engine runs with the Transformers that is installed; the connector works with older ones too."""

from __future__ import annotations

from packaging.version import Version

MIN_TRANSFORMERS = Version("5.0")


def embedded_engine_refusal() -> str | None:
    """Why the embedded engine does not run with the installed Transformers; None where it does."""
    import transformers

    if Version(transformers.__version__) >= MIN_TRANSFORMERS:
        return None
    return (
        f"Transformers {transformers.__version__} is installed; the embedded engine and the validation need "
        f"{MIN_TRANSFORMERS} or later. The connector alone works without"
    )
