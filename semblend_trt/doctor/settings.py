"""What the settings name outside of this process: variables, a NATS server, folders and files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from semblend_trt.config import Settings, masked, settings_in_use, unknown_variables, why_ignored
from semblend_trt.doctor.finding import Area
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from semblend_trt.doctor.finding import Finding
    from semblend_trt.fleet.connection import ConnectionOptions

NATS_SECONDS = 3.0
_settings, _fleet, _files = Area("settings"), Area("fleet"), Area("files")


def variables(
    settings: Settings | None, problem: str | None, options: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """Variables that are not read, and settings that switch reuse off; `problem` says why there are no `settings`.
    `options`: what the options of another engine than TensorRT-LLM give of them."""
    for name, close in unknown_variables(os.environ).items():
        if (why := why_ignored(name)) is not None:
            yield _settings.note(f"{name} is ignored: {why}")
        else:
            yield _settings.failed(f"{name} is not read" + (f"; did you mean {close}?" if close else ""), variable=name)
    if settings is None:
        yield _settings.failed(problem or "cannot be read")
        return
    rows = settings_in_use(settings)
    for row in rows:
        for ignored in row.ignored:
            yield _settings.note(f"{ignored} is set and not read, because {row.source} is set too")
    given = [row.source for row in rows if row.source is not None and row.name not in (options or {})]
    given += [f"{name} of the engine's options" for name in options or {}]
    text = f": {', '.join(given)}" if given else ""
    yield _settings.ok(f"{len(given)} of {len(rows)} settings are given{text}")
    short = [name for name in given if not name.startswith("TRTLLM")]
    if short and options is None:
        yield _settings.note(
            f"TensorRT-LLM hands only variables that begin with TRTLLM on to its workers: give {', '.join(short)} with "
            "the prefix TRTLLM_SEMBLEND_ there"
        )
    if not settings.enabled:
        yield _settings.refused("disabled", "SEMBLEND_ENABLED is 0: every request is served cold")
    elif settings.policy.value == "off":
        yield _settings.refused("policy_off", "SEMBLEND_POLICY is off: every request is served cold")


def nats(settings: Settings) -> Iterator[Finding]:
    """Connects as the publisher would, and disconnects; nothing is sent."""
    from semblend_trt.fleet.connection import ConnectionOptions

    options = ConnectionOptions.of(settings)
    if options is None:
        return
    for variable, path in (
        ("SEMBLEND_NATS_TLS_CA", options.tls_ca),
        ("SEMBLEND_NATS_TLS_CERT", options.tls_cert),
        ("SEMBLEND_NATS_TLS_KEY", options.tls_key),
        ("SEMBLEND_NATS_CREDS", options.creds),
    ):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            yield _fleet.failed(f"{variable} names {path}, which is no file that can be read; mend its path")
    try:
        version = asyncio.run(asyncio.wait_for(_greet(options), NATS_SECONDS))
    except ConfigurationError as error:
        yield _fleet.failed(str(error))
    except Exception as error:  # its text may hold a password
        yield _fleet.failed(
            f"NATS is out of reach at {masked(','.join(options.servers))} ({type(error).__name__}): start it, or mend "
            "SEMBLEND_NATS_URL; serving goes on without it, and donor events are lost"
        )
    else:
        yield _fleet.ok(f"NATS answers (nats-server {version})", server_version=version)


def disk(settings: Settings) -> Iterator[Finding]:
    """Whether the disk tier can use its folder. A temporary file is made there; nothing is left."""
    from semblend_trt.donors.disk_tier import FOLDER, is_in_use, key_path, read_key

    if not settings.disk_bytes:
        if settings.disk_path is not None:
            yield _files.note("SEMBLEND_DISK_PATH is set, but SEMBLEND_DISK_BYTES is 0: nothing is written")
        return
    if settings.disk_path is None:
        yield _files.failed("SEMBLEND_DISK_BYTES is set; set SEMBLEND_DISK_PATH to a folder as well")
        return
    folder, variable = settings.disk_path / FOLDER, "SEMBLEND_DISK_KEY_PATH"
    try:
        key = key_path(settings.disk_key_path, folder)
        if key.is_symlink() or key.exists():
            read_key(key)
        elif (problem := _unwritable(key.parent)) is not None:
            raise OSError(problem)
        variable = "SEMBLEND_DISK_PATH"
        is_used = is_in_use(settings.disk_path)
        if (problem := _unwritable(folder)) is not None:
            raise OSError(problem)
    except OSError as error:
        yield _files.failed(f"{variable}: {error}; no donor is kept on disk")
        return
    if is_used:
        yield _files.note(f"{folder} is in use by an engine; a second one gets no disk tier")
    free = shutil.disk_usage(_nearest(folder)).free
    text = f"{folder} can be written, {free} bytes are free"
    if free < settings.disk_bytes:
        yield _files.note(f"{text}, fewer than SEMBLEND_DISK_BYTES, {settings.disk_bytes}; what is in it counts too")
    else:
        yield _files.ok(text, folder=str(folder), free=free)


def audit(settings: Settings) -> Iterator[Finding]:
    """Whether events can be appended to the audit log."""
    path = settings.audit_path
    if path is None:
        return
    problem = None
    try:
        if path.is_file() and not os.access(path, os.W_OK):
            problem = f"{path} is no file that can be written"
        elif not path.is_file():
            check_writable(path)
    except (ConfigurationError, OSError) as error:
        problem = str(error).rstrip(".")
    if problem is None:
        yield _files.ok(f"audit events can be appended to {path}")
    else:
        yield _files.failed(f"SEMBLEND_AUDIT_PATH: {problem}; serving goes on, and audit events are lost")


async def _greet(options: ConnectionOptions) -> str:
    from semblend_trt.fleet.connection import connect_client

    client = await connect_client(options, name="semblend-trt doctor")
    try:
        await client.flush()
        if options.stream is not None:
            await client.jetstream(timeout=NATS_SECONDS).account_info()
        return str(client.connected_server_version)
    finally:
        with contextlib.suppress(Exception):
            await client.close()


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or where it would be made; None when one can."""
    place = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"no file can be made in {place} ({error.strerror or error})"


def _nearest(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
