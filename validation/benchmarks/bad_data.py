"""Bad inputs that are data: spoiled and forged donor events, and spoiled files of every kind that is read."""

from __future__ import annotations

import json
import random
import signal
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from kernels.layout import ContiguousKv
from semblend_trt.benchmarks.fleet_server import NAMESPACE
from semblend_trt.doctor.trtllm import read_options
from semblend_trt.donors.disk_tier import FOLDER, DiskTier
from semblend_trt.donors.donor_file import DonorFileError, DonorText, KvForm
from semblend_trt.donors.host_tier import HostKv
from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.router.config import load_config
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter, donor_digest, token_digest
from semblend_trt.reuse_profile import ReuseProfile
from validation.benchmarks.server_process import MODEL
from validation.cases import read_cases
from validation.replay.trace import trace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# No field that is read may have one of these.
_WRONG: tuple[Any, ...] = (None, True, -1, -1.5, float("inf"), 1 << 70, "", "\ud800", "x" * 70_000, [], [[]], {"x": 1})
DATA_PATIENCE = 20.0
_WORKER, _GENERATION, _DONOR = (1, 0), 7, "donor"
_TIER = "host"
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


class Answer(Enum):
    """What became of an input. TAKEN: accepted, and not counted, since a spoiled input may still be a good one."""

    REFUSED = "refused"
    TAKEN = "taken"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Tried:
    """One input: where it was given, what it was, what became of it, and what was seen of a fault."""

    door: str
    what: str
    answer: Answer
    told: str = ""


class TooLongError(BaseException):
    """An input took too long. Not an Exception, so that no reader catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TooLongError in the main thread when the block takes longer."""

    def end(*_: object) -> None:
        raise TooLongError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, added, or missing."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
    noise = rng.randbytes(end - start)
    return rng.choice(
        (
            data[:start],
            data[:start] + data[end:],
            data[:start] + noise + data[end:],
            data[:start] + noise + data[start:],
            data[:end] + data[start:],
            data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
        )
    )


def spoiled_value(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one part is wrong or missing."""
    spoiled = deepcopy(value)
    owner, name = rng.choice(list(_parts(spoiled)))
    if rng.random() < 0.2:
        del owner[name]
    else:
        owner[name] = rng.choice(_WRONG)
    return spoiled


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a value, as its container and its key there; of a list only the first item."""
    places = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:1]))
    for name, part in places:
        yield value, name
        if isinstance(part, (dict, list)):
            yield from _parts(part)


def messages(form: EventFormat, worker: tuple[int, int] = _WORKER, generation: int = _GENERATION) -> list[bytes]:
    """One good message of each kind, in the order in which a worker sends them."""
    writer = EventWriter(Emitter(*worker, generation), form)
    tokens = np.arange(256, dtype=np.int32)
    sketch = sketch_of(tokens, sketch_key(NAMESPACE.key, None)).to_bytes()
    return [
        writer.reset(),
        writer.registered(_DONOR, NAMESPACE, _TIER, len(tokens), token_digest(tokens), sketch),
        writer.heartbeat(10.0, 1, donor_digest(_DONOR, _TIER)),
        writer.relocated(_DONOR, "device"),
        writer.evicted(_DONOR),
        writer.purged(),
    ]


def event_tries(spoiled: int, forged: int) -> Iterator[Tried]:
    """Gives spoiled and forged messages, each to a new directory."""
    rng = random.Random(0)
    for number in range(spoiled):
        form = rng.choice(list(EventFormat))
        payload = rng.choice(messages(form))
        if rng.random() < 0.5:
            payload = spoiled_bytes(rng, payload)
        elif form is EventFormat.JSON:
            payload = json.dumps(spoiled_value(rng, json.loads(payload))).encode()
        else:
            payload = _packed(spoiled_value(rng, msgspec.msgpack.decode(payload)))
        yield _given(f"spoiled {form.value} {number}", payload, None)
    for number in range(forged):
        form, kind = rng.choice(list(EventFormat)), rng.randrange(6)
        what, worker, generation, sender = rng.choice(
            (
                ("of another worker", _WORKER, 8, "2"),
                ("repeated", _WORKER, _GENERATION, "1"),
                ("of an earlier generation", _WORKER, 3, "1"),
                ("of a worker without a number", _WORKER, 8, ">"),
            )
        )
        # Only the first two were sent before.
        kind = kind % 2 if what == "repeated" else kind
        yield _given(f"{what}, {form.value} {number}", messages(form, worker, generation)[kind], sender, is_bad=True)


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):  # MessagePack has no such value; as JSON it can be said
        return json.dumps(value, default=list).encode()


def _given(what: str, payload: bytes, sender: str | None, is_bad: bool = False) -> Tried:
    """Gives a message to a directory that follows one worker with one donor; a bad one must be counted, and no more."""
    problems: list[str] = []
    directory = Directory(max_donors=16, on_problem=lambda _, sentence: problems.append(sentence))
    for good in messages(EventFormat.JSON)[:2]:
        directory.observe(good)
    problems.clear()
    try:
        with within(DATA_PATIENCE):
            verdict = directory.observe(payload, sender)
    except (Exception, TooLongError) as error:
        return Tried("events", what, Answer.FAULT, f"{error!r} of {payload[:200]!r}")
    wrong, is_taken = "", verdict is not None and verdict.is_to_apply
    if is_taken:
        wrong = "it was believed" if is_bad else ""
    elif (held := directory.donors_of(_WORKER)) != {_DONOR: _TIER}:
        wrong = f"it was not believed, and changed what is held to {held}"
    elif not problems:
        wrong = "the directory did not count it"
    if wrong:
        return Tried("events", what, Answer.FAULT, f"{wrong}: {payload[:200]!r}")
    return Tried("events", what, Answer.TAKEN if is_taken else Answer.REFUSED)


def file_tries(folder: Path, count: int) -> Iterator[Tried]:
    """Reads `count` spoiled files of each kind, and those that are bad by themselves. `folder` is empty."""
    rng = random.Random(0)
    profile = json.loads((MODEL / "reuse-profile.json").read_bytes())
    kinds: dict[str, tuple[Callable[[Path], object], Callable[[], bytes], tuple[bytes, ...], bool]] = {
        "profile": (ReuseProfile.read, partial(_spoiled_json, rng, profile), _NO_JSON, False),
        "router": (load_config, partial(_spoiled_toml, rng), _alternatives(_NO_ROUTER, _ROUTER), True),
        "options": (read_options, partial(_broken_yaml, rng), _alternatives(_NO_OPTIONS), True),
        "cases": (read_cases, partial(_spoiled_json, rng, _CASE), _NO_JSON, False),
        "trace": (trace_file, partial(_spoiled_json, rng, _REQUEST), _NO_JSON, False),
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
    """Gives a file to its reader, which must refuse it where it `is_bad`."""
    if content is not None:
        path.write_bytes(content)
    shown = "" if content is None else repr(content[:200])
    try:
        with within(DATA_PATIENCE):
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
    """Spoils every other donor file of a folder. They must be counted and ignored, and the good ones found."""
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
        with within(DATA_PATIENCE + 0.1 * count):
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
