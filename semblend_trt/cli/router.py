"""Says what replaced the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse

SUMMARY = "say what replaced the router"
REPLACED = (
    "the router is gone: gateways place requests now, LiteLLM by the callback semblend_trt.fleet.litellm.placement, "
    "NVIDIA Dynamo by `python -m semblend_trt.fleet.dynamo` and others by the library semblend_trt.fleet.placement; "
    "docs/fleet.md shows how"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Take the router's arguments, so that its users read the sentence and not one about an argument."""
    for option in ("--config", "--check"):
        parser.add_argument(option, nargs="?", help="no longer used")


def run(_: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    raise ConfigurationError(REPLACED)
