"""Writes files whole or not at all, checks that one can be written, opens what only this user owns, and reads inputs.
Opening never waits for the other end of a pipe. Files that only this user owns are no links."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

_TEMPORARY_PREFIX = ".semblend-"
# Finds a full disk: a file system may keep less than this beside a file's name.
_TRIAL = bytes(1 << 16)
_FULL_DEVICE = os.makedev(1, 7)  # /dev/full
_NO_LINK_NO_WAIT = os.O_NOFOLLOW | os.O_NONBLOCK
# More than any file that is read whole. A longer line is passed over, never held whole.
MAX_FILE_BYTES = MAX_LINE_BYTES = 64 << 20
# A pipe that gives no byte in this time has no writer that goes on.
PIPE_SECONDS = 60.0


def write_bytes(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write `content` to a new file, then rename it to `path`. Follows symlinks and makes folders. Writes to a device
    or a pipe directly. A private file has mode 600. Raises OSError."""
    target, status = _target_of(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        path.write_bytes(content)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=_TEMPORARY_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if not is_private:  # mkstemp lets only the owner read; the file gets the mode that open() would give it
            os.umask(mask := os.umask(0))
            os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raise ConfigurationError when `path` could not be written at the end of a long run. A temporary file is made in
    the nearest folder that exists; of a device or a pipe only the permissions count."""
    try:
        target, status = _target_of(path)
        if status is None or stat.S_ISREG(status.st_mode):
            folder = next(parent for parent in target.parents if parent.exists())
            longest = os.pathconf(folder, "PC_NAME_MAX")
            if any(len(os.fsencode(part)) > longest for part in target.relative_to(folder).parts):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            with tempfile.NamedTemporaryFile(dir=folder, prefix=_TEMPORARY_PREFIX, buffering=0) as file:
                if file.write(_TRIAL) < len(_TRIAL):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif stat.S_ISDIR(status.st_mode):
            raise ConfigurationError(f"{path} is a folder; name a file.")
        elif stat.S_ISSOCK(status.st_mode) or not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif status.st_rdev == _FULL_DEVICE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigurationError(
            f"{str(path)[:200]} cannot be written ({error.strerror or error}); name another file."
        ) from error


def _target_of(path: Path) -> tuple[Path, os.stat_result | None]:
    target = Path(os.path.realpath(path))
    try:
        return target, path.stat()
    except FileNotFoundError:
        return target, None


@contextmanager
def open_file(
    path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None, *, refused: int = 0
) -> Iterator[int]:
    """Yield the descriptor of a regular file that this user owns; a new one has mode 600. Raises OSError. With
    `folder`, a folder's descriptor, `path` is a name in it. A mode with any bit of `refused` is refused."""
    try:
        descriptor = os.open(path, flags | _NO_LINK_NO_WAIT, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link; only a file itself is used") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        refuse_others(descriptor, path, refused)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_folder(path: str | Path, folder: int | None = None) -> Iterator[int]:
    """Yield the descriptor of a folder; with `folder`, `path` is a name in that one. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK_NO_WAIT, dir_fd=folder)
    except NotADirectoryError as error:  # the error for a link too
        raise NotADirectoryError(f"{path} is a symbolic link or no folder; name a folder itself") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_others(descriptor: int, path: str | Path, rights: int) -> None:
    """Raise OSError where another user owns the file, or its mode has one of `rights`."""
    about, user = os.fstat(descriptor), os.geteuid()
    if about.st_uid != user:
        message = f"{path} belongs to user {about.st_uid}, and this process is user {user}: take one of its own"
        raise PermissionError(message)
    if about.st_mode & rights:
        message = f"{path} has mode {stat.S_IMODE(about.st_mode):03o}, open to others; make it anew for its owner alone"
        raise PermissionError(message)


def open_input(path: str | Path, *, may_be_pipe: bool = False, buffering: int = 1 << 16) -> io.BufferedReader:
    """Open a regular file to read; with `may_be_pipe` also a pipe from the command's start: `-`, /dev/stdin, /dev/fd/N.
    Raises OSError; reading raises it where a pipe gives nothing for PIPE_SECONDS."""
    name = "/dev/stdin" if may_be_pipe and str(path) == "-" else str(path)
    is_standard = may_be_pipe and name.startswith(("/dev/stdin", "/dev/fd/"))
    raw = (_Pipe if is_standard else io.FileIO)(name, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    mode = os.fstat(raw.fileno()).st_mode
    if not (stat.S_ISREG(mode) or (is_standard and stat.S_ISFIFO(mode))):
        raw.close()
        hint = "; a pipe can be given as /dev/stdin" if may_be_pipe else ""
        raise OSError(errno.EINVAL, f"it is not a regular file{hint}", name)
    return io.BufferedReader(raw, buffering)


class _Pipe(io.FileIO):
    def readinto(self, buffer: Any) -> int | None:
        waiting = select.poll()
        waiting.register(self.fileno(), select.POLLIN)
        if not waiting.poll(1000 * PIPE_SECONDS):
            raise TimeoutError(errno.ETIMEDOUT, f"not a byte came within {PIPE_SECONDS:g} s")
        return super().readinto(buffer)


def read_input(path: str | Path, most: int = MAX_FILE_BYTES, *, may_be_pipe: bool = False) -> bytes:
    """Return the content of what `open_input` opens. Raises OSError, also for more than `most` bytes."""
    with open_input(path, may_be_pipe=may_be_pipe) as file:
        content = file.read(most + 1) or b""
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def read_text(path: str | Path, *, may_be_pipe: bool = False) -> str:
    """Return the text of such a file. Raises OSError, and ConfigurationError where it is not UTF-8."""
    content = read_input(path, may_be_pipe=may_be_pipe)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8; write the file in UTF-8"
        ) from None


def bounded_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield a file's lines, each cut right after MAX_LINE_BYTES, with the bytes that it has in the file."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        size, rest = len(line), line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
            size += len(rest)
        yield line, size


def too_long(line: bytes) -> str | None:
    """Return why a line that was cut is passed over; None for a whole one."""
    return f"longer than {MAX_LINE_BYTES >> 20} MiB" if len(line) > MAX_LINE_BYTES else None
