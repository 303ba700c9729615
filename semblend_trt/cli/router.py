"""Routes requests to the replicas that hold their text: an HTTP proxy of the OpenAI API, set up by a TOML file.

docs/router.toml has the file's fields. It exits with 2 when the configuration cannot be used, and says why; with
--check it only looks.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from semblend_trt.config import Settings
    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.router.config import RouterConfig

SUMMARY = "route requests to the replicas that hold their text"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the configuration's place."""
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file with replicas, tenants and so on")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is ended. Raises ConfigurationError when it cannot."""
    import asyncio

    from semblend_trt.errors import ConfigurationError

    try:
        from semblend_trt.fleet.router.app import Router
        from semblend_trt.fleet.router.config import load_config
        from semblend_trt.fleet.router.serving import serve
    except ImportError as error:
        raise ConfigurationError(f"the router needs {error.name}; install semblend-trt[router]") from None
    from semblend_trt.model_tokenizer import load_tokenizer

    config = load_config(arguments.config)
    settings, options = settings_of(config)
    router = Router(config, os.environ, load_tokenizer(config.model), options, settings.audit_sample)
    if arguments.check:
        count = len(config.replicas)
        sys.stdout.write(f"{arguments.config}: {count} replica{'s' * (count != 1)}, policy {config.policy}\n")
        return 0
    asyncio.run(serve(router.app(), config.host, config.port, "routing", router.connections()))
    return 0


def settings_of(config: RouterConfig) -> tuple[Settings, ConnectionOptions | None]:
    """Return the settings, the file's where it has one, and where donor events are read."""
    from dataclasses import replace

    from semblend_trt.config import load_settings
    from semblend_trt.fleet.connection import ConnectionOptions

    of_file = {name: getattr(config, name) for name in ("nats_subject", "nats_url", "audit_sample")}
    settings = load_settings(**{name: value for name, value in of_file.items() if value is not None})
    options = ConnectionOptions.of(settings)
    return settings, None if options is None else replace(options, stream=None)
