"""Bad files: reuse profiles, the router's configuration, engine options, JSON lines and donors' files."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.layout import ContiguousKv
from semblend_trt.doctor.options import read_options
from semblend_trt.donors.disk import FOLDER, DiskTier
from semblend_trt.donors.donor_file import DonorFileError, KvForm
from semblend_trt.donors.donor_text import DonorText
from semblend_trt.donors.host_kv import HostKv
from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.router.config import load_config
from semblend_trt.reuse_profile import ReuseProfile
from validation.benchmarks.server_process import MODEL
from validation.benchmarks.spoiling import Answer, TooLongError, Tried, spoiled_bytes, spoiled_value, within
from validation.jsonl import read_cases
from validation.replay.trace import trace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 20.0
_FORM = KvForm(num_layers=2, kv_factor=2, kv_heads=1, head_dim=8, dtype=torch.float32)
_TOKENS, _SUFFIX = 16, ".donor.safetensors"
_CASE = {"id": "a", "donors": ["a document"], "prompt": "a prompt", "reference": None}
_REQUEST = {"request_id": "a", "timestamp_ms": 1.0, "blocks": [{"token_count": 3, "position": 0}], "metadata": {}}
_ROUTER = 'port = 0\nmodel = "m"\nsecret_env = "S"\n[[replicas]]\nurl = "http://127.0.0.1:1"\nworker_id = 1\n'
# None of the fields above may have one of these.
_WRONG_TOML = ("[]", "[[1]]", "{ x = 1 }", "nan", "-1e400", "1979-05-27", "")
_NO_ROUTER = (
    "replicas = []",
    "[replicas]",
    "[[replicas]]\nurl = 7",
    "[keys]",
    "[[keys]]\ntenants = []",
    "[status]",
    "[telemetry]",
    "port = 1",
    "unknown = 1",
    "model = ",
    '"" = 1',
    "a.b.c = 1",
    "x = [" * 5_000,
)
_NO_OPTIONS = (
    "",
    "- 1",
    "7",
    "a: b: c",
    "a: [1",
    "a: !!python/object:os.system x",
    "\ta: 1",
    "a: &a [*a]",
    "{" * 5_000,
    # Each name stands for ten of the one before.
    "a: &a [1,1]\n" + "".join(f"{two}: &{two} [{','.join([f'*{one}'] * 10)}]\n" for one, two in pairwise("abcdefg")),
    "x" * (2 << 20),
    "a: \x00",
    "%YAML 9.9\n---\na: 1",
    "? [1]\n: 2",
)
_NO_JSON = (b"", b"\n", b"7", b"[]", b"null", b"{", b"\xff\xfe", b"\x00" * 64, b'{"a": NaN', b"[" * 50_000, b'{"a": 1}')


def tries(folder: Path, count: int) -> Iterator[Tried]:
    """Reads `count` spoiled files of each kind, and those that are bad by themselves. `folder` is empty."""
    rng = random.Random(0)
    profile = json.loads((MODEL / "reuse-profile.json").read_bytes())
    kinds: dict[str, tuple[Callable[[Path], object], Callable[[], bytes], tuple[bytes, ...], bool]] = {
        "profile": (ReuseProfile.read, partial(_spoiled_json, rng, profile), _NO_JSON, False),
        "router": (load_config, partial(_spoiled_toml, rng), _alternatives(_NO_ROUTER, _ROUTER), True),
        "options": (read_options, partial(_broken_yaml, rng), _alternatives(_NO_OPTIONS), True),
        "cases": (read_cases, partial(_spoiled_json, rng, _CASE), _NO_JSON, False),
        "trace": (partial(trace_file, skip_bad=False), partial(_spoiled_json, rng, _REQUEST), _NO_JSON, False),
    }
    for kind, (read, make, bad, is_each_bad) in kinds.items():
        for number in range(count):
            yield _read(f"{kind} {number}", folder / "spoiled", make(), read, is_bad=is_each_bad)
        for content in bad:
            yield _read(f"{kind} of {content[:40]!r}", folder / "bad", content, read, is_bad=True)
        for what, path in (("missing", folder / "missing"), ("a folder", folder), ("too long", folder / ("n" * 300))):
            yield _read(f"{kind}, {what}", path, None, read, is_bad=True)
    yield from _donor_files(folder / "donors", rng, count)


def _read(what: str, path: Path, content: bytes | None, read: Callable[[Path], object], *, is_bad: bool) -> Tried:
    """What the reader makes of a file; one that is `is_bad` may not be taken."""
    if content is not None:
        path.write_bytes(content)
    shown = "" if content is None else repr(content[:200])
    try:
        with within(PATIENCE):
            read(path)
    except SemBlendError as error:
        is_sentence = str(error).strip() and "Traceback" not in str(error)
        return Tried("files", what, Answer.REFUSED if is_sentence else Answer.FAULT, str(error))
    except (Exception, TooLongError) as error:
        return Tried("files", what, Answer.FAULT, f"{error!r} of {shown}")
    return Tried("files", what, Answer.FAULT if is_bad else Answer.TAKEN, f"it was taken: {shown}")


def _alternatives(lines: tuple[str, ...], beginning: str = "") -> tuple[bytes, ...]:
    return tuple((beginning + line).encode() for line in lines)


def _spoiled_json(rng: random.Random, value: Any) -> bytes:
    if rng.random() < 0.6:
        return json.dumps(spoiled_value(rng, value)).encode()
    return spoiled_bytes(rng, json.dumps(value).encode())


def _spoiled_toml(rng: random.Random) -> bytes:
    """The router's file with a wrong value in one of its fields, or with a control character."""
    lines = _ROUTER.splitlines()
    at = rng.choice([at for at, line in enumerate(lines) if "=" in line])
    lines[at] = lines[at].split("=")[0] + "= " + rng.choice((*_WRONG_TOML, f'"\x00{rng.random()}"'))
    return "\n".join(lines).encode()


def _broken_yaml(rng: random.Random) -> bytes:
    """Options with a character that no YAML may have."""
    text = "kv_cache_config:\n  enable_block_reuse: true\nmax_batch_size: 8\n"
    at = rng.randrange(len(text))
    return (text[:at] + chr(rng.choice((0, 1, 7, 8, 11, 27, 127, 0xFFFF))) + text[at:]).encode()


def _changed(rng: random.Random, data: bytes) -> bytes:
    while (changed := spoiled_bytes(rng, data)) == data:
        pass
    return changed


def _donor_files(folder: Path, rng: random.Random, count: int) -> Iterator[Tried]:
    """Every other file of a good folder is spoiled. Those are counted and ignored, and the good ones found."""
    names = [f"donor-{number:04}" for number in range(2 * count)]
    tier = DiskTier(folder, _FORM, folder.parent / "key")
    kv = HostKv((ContiguousKv(torch.zeros(_FORM.in_file(_TOKENS)).permute(0, 2, 3, 1, 4)),))
    for name in names:
        tier.write(name, DonorText("namespace", np.arange(_TOKENS, dtype=np.int32), bytes(16)), kv)
    tier.close()
    for name in names[1::2]:
        path = folder / FOLDER / (name + _SUFFIX)
        path.write_bytes(_changed(rng, path.read_bytes()))
    tier = DiskTier(folder, _FORM, folder.parent / "key")
    found, refused, faults = set(), 0, ""
    try:
        with within(PATIENCE + 0.1 * count):
            for each in tier.scan():
                if isinstance(each, DonorFileError):
                    refused += 1
                    continue
                donor_id = each[0]
                try:
                    tier.read(donor_id, kv)
                    found.add(donor_id)
                except DonorFileError:
                    refused += 1
    except (Exception, TooLongError) as error:
        faults = repr(error)
    finally:
        tier.close()
    if faults or found != set(names[::2]):
        yield Tried("files", "good donors among bad ones", Answer.FAULT, faults or f"found {len(found)} of {count}")
    for number in range(count):
        answer = Answer.REFUSED if number < refused else Answer.FAULT
        yield Tried("files", f"donor {number}", answer, "a spoiled file was not counted")
