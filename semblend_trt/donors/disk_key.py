"""The key that seals donors' files: 32 random bytes that are made once and that their owner alone can read."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from semblend_trt.donors.own_files import open_file, refuse_others

KEY_BYTES = 32


def key_path(given: Path | None, sealed: Path) -> Path:
    """The key's file: the given one, else `semblend-trt/donor-key` in the user's state folder (XDG base directory
    specification). Raises OSError, also where it would lie in `sealed`, the folder of the files."""
    path = given or _state_folder() / "semblend-trt" / "donor-key"
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(sealed)):
        raise OSError(f"the key {path} lies among the files that it seals; set SEMBLEND_DISK_KEY_PATH to one elsewhere")
    return path


def read_key(path: Path) -> bytes:
    """Raises FileNotFoundError where there is none, and OSError where it cannot be used."""
    descriptor = open_file(path)
    try:
        refuse_others(descriptor, path, 0o077)
        key = os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is no key of {KEY_BYTES} bytes; remove it, and a new one is made")
    return key


def make_key(path: Path) -> bytes:
    """The key of the file, made where there is none; of several who make it at once, all have the same one.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        return read_key(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whole before it has its name, which is given only once: nobody reads half a key, and none is written over.
    unnamed = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = open_file(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(unnamed, path)
    finally:
        os.close(descriptor)
        unnamed.unlink()
    return read_key(path)


def _state_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        return Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise OSError("this user has no home for the disk tier's key; set SEMBLEND_DISK_KEY_PATH to a file") from error
