"""Says what reuse would save on your traffic: replays the prompts of FILE through the look-up and the tiers.

No model and no card are needed. FILE holds JSON lines (OpenAI request bodies, LiteLLM's logs, chats, texts, token ids),
a log of vLLM, or plain text with a prompt a line. Prompts are served in order, each whole before the next. What it
prints and writes holds no text of a prompt. Lines that cannot be read are passed over and counted. It exits with 0, and
with 2 when it passed over more than it read. docs/estimate.md says how to read the figures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semblend_trt.command_line import USAGE_ERROR, count, named, printable
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable, open_input, write_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from semblend_trt.config import Settings
    from semblend_trt.pool_facts import PoolFacts
    from semblend_trt.reuse_profile import ReuseProfile
    from validation.estimate.figures import Figures
    from validation.estimate.prompts import Encoder
    from validation.replay.trace import Skipped

SUMMARY = "say what reuse would save on the prompts of a log"
SCHEMA = 2
FORMATS = ("jsonl", "vllm", "text")
# Of Qwen2.5-7B in bfloat16, the model of the recorded times: 28 layers, K and V, 4 heads of 128 channels.
KV_BYTES_A_TOKEN = 28 * 2 * 4 * 128 * 2
# About what an 80 GB card has left beside such a model.
POOL_BYTES = 48 << 30
# A look-up's time on this machine says nothing about the engine's: none is given up.
_LOOKUP_MS = 60_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the log, how it is read, the memory, and what is written."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the prompts, in the order in which they came")
    parser.add_argument("--format", choices=FORMATS, help="what FILE holds (default: what its beginning shows)")
    parser.add_argument("--limit", type=count, metavar="N", help="replay the first N prompts alone")
    text = "folder or hub id of the model's tokenizer (default: a small one that ships with the package)"
    parser.add_argument("--tokenizer", type=named, metavar="PATH_OR_ID", help=text)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", type=named, metavar="PATH_OR_ID", help="the model, whose configuration sizes its KV")
    text = f"bytes of one token's KV (default: {KV_BYTES_A_TOKEN}, that of Qwen2.5-7B)"
    size.add_argument("--kv-bytes-a-token", type=count, metavar="N", help=text)
    text = "the model's reuse profile, by whose terms the figures then are (default: any run, of exact donors)"
    size.add_argument("--profile", type=Path, metavar="FILE", help=text)
    text = "memory for donors (default: SEMBLEND_HOST_BYTES)"
    parser.add_argument("--host-bytes", type=count, metavar="N", help=text)
    text = "the engine's own KV pool, whose prefix cache comes first (default: %(default)s)"
    parser.add_argument("--pool-bytes", type=count, default=POOL_BYTES, metavar="N", help=text)
    parser.add_argument("--block-size", type=count, default=32, metavar="N", help="tokens of a block of the pool")
    parser.add_argument("--min-span", type=count, metavar="N", help="shortest run (default: SEMBLEND_MIN_SPAN)")
    parser.add_argument("--ttft", type=Path, metavar="FILE", help="TTFTs to predict by (default: vLLM's on an H100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(arguments: argparse.Namespace) -> int:
    """Replay, print and write. Raises SemBlendError and OSError."""
    from validation.estimate.figures import SHIPPED_TIMES, Figures, LatencyModel, Serving, recorded_observations
    from validation.estimate.prompts import Encoder

    if arguments.json is not None:
        check_writable(arguments.json)
    source = "vLLM 0.25.1 on an H100 with a model like Qwen2.5-7B" if arguments.ttft is None else str(arguments.ttft)
    model = LatencyModel.fitted(recorded_observations(arguments.ttft or SHIPPED_TIMES), source)
    terms = _terms(arguments)
    pool = _pool(arguments, next((each.profile for each in terms if each.profile), None))
    if arguments.tokenizer is None:
        sys.stderr.write(
            "semblend-trt: without --tokenizer prompts are read by a small tokenizer: shares are about right, but a "
            "prompt has more tokens than for a large model, so that the times are too long\n"
        )
    figures = [Figures(each.name, Serving(each.settings, pool, each.profile)) for each in terms]
    skipped = _replayed(arguments, Encoder(arguments.tokenizer), pool, figures)
    passed_over, prompts = skipped.counts.total(), figures[0].prompts
    if not prompts:
        why = "no prompt; give a log of requests, one a line"
        if passed_over:
            why = f"no prompt that can be read; one request a line is expected. {skipped.sentence()}"
        sys.stderr.write(f"semblend-trt: {printable(f'{arguments.file} holds {why}')}\n")
        return USAGE_ERROR
    shown, *compared = [{**each.to_dict(), "expected_ttft": each.expected_ttft(model)} for each in figures]
    a_token = pool.geometry.bytes_per_token(pool.dtype)
    report = {
        "schema": SCHEMA,
        **shown,
        "skipped": {why: {"count": n, "first_line": skipped.first[why]} for why, n in skipped.counts.most_common()},
        "memory": {
            "evicted_donors": figures[0].serving.donors.catalog.stats().evicted,
            "kv_bytes_a_token": a_token,
            "host_tokens": terms[0].settings.host_bytes // a_token,
            "pool_tokens": pool.num_blocks * pool.geometry.block_size,
            "min_span_tokens": terms[0].settings.min_span_tokens,
        },
        "tokenizer": arguments.tokenizer or "shipped",
    }
    for each in compared:
        kept = ("terms", "shares", "prompts_without_donors", "expected_ttft")
        report["compared"] = {name: each[name] for name in kept}
    sys.stdout.write(_shown(report) + "\n")
    for sentence in filter(None, (skipped.sentence(), model.sentence())):
        sys.stdout.write(printable(sentence) + "\n")
    if arguments.json is not None:
        write_bytes(arguments.json, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
    if passed_over <= prompts:
        return 0
    sys.stderr.write(
        f"semblend-trt: {passed_over:,} lines were passed over and {prompts:,} prompts read, so that these are not the "
        "figures of this log; mend what is named above\n"
    )
    return USAGE_ERROR


class Terms(NamedTuple):
    """The terms of reuse that prompts are served under, and their `name` for a reader."""

    name: str
    settings: Settings
    profile: ReuseProfile | None = None


def _terms(arguments: argparse.Namespace) -> list[Terms]:
    """Return what is set and any run without a profile, once if they are the same; what is set is first with --profile.
    Raises ConfigurationError if --profile lacks evidence; one of the environment is then refused, as in service."""
    from semblend_trt.config import load_settings
    from semblend_trt.policy import ReusePolicy
    from semblend_trt.reuse_profile import ReuseProfile

    given = {"host_bytes": arguments.host_bytes, "min_span_tokens": arguments.min_span}
    if arguments.profile is not None:
        given["policy"] = ReusePolicy.VERIFIED
    known = {name: value for name, value in given.items() if value is not None}
    own = load_settings(**known, enabled=True, lookup_deadline_ms=_LOOKUP_MS)
    path, profile, title = arguments.profile or own.profile_path, None, f"as set: policy {own.policy.value}"
    if own.policy is ReusePolicy.VERIFIED and path is not None:
        profile, title = ReuseProfile.read(path), f"{title}, profile {Path(path).name}"
        if (lacking := profile.evidence_refusal(own.max_kl, own.risk)) is not None:
            if arguments.profile is not None:
                raise ConfigurationError(lacking)
            profile, title = None, f"{title}, which is refused: exact runs"
    elif own.policy is ReusePolicy.VERIFIED:
        title += " without a profile: exact runs"
    as_set = Terms(title, own, profile)
    # A copy, since a bound of the environment is for policy verified alone.
    any_run = Terms("any run, without a profile", own.model_copy(update={"policy": ReusePolicy.POSITION_FIX}))
    if arguments.profile is not None:
        return [as_set, any_run]
    return [any_run] if own.policy is ReusePolicy.POSITION_FIX else [any_run, as_set]


def _pool(arguments: argparse.Namespace, profile: ReuseProfile | None) -> PoolFacts:
    """Return the engine's pool. Raises ConfigurationError for a model that would be refused."""
    import torch

    from kernels.layout import KvGeometry
    from semblend_trt.doctor.model import AUTO, KnownModel, known_model
    from semblend_trt.pool_facts import PoolFacts

    size = arguments.block_size
    geometry = KvGeometry(1, 1, arguments.kv_bytes_a_token or KV_BYTES_A_TOKEN, size, kv_factor=1)
    dtype, chunk = torch.int8, None
    if arguments.model is not None:
        known = known_model(arguments.model, AUTO)
        if not isinstance(known, KnownModel):
            raise ConfigurationError(f"{known.text}; give --kv-bytes-a-token in place of --model")
        facts, dtype = known.facts, known.dtype or torch.bfloat16
        chunk = facts.chunk
        geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, size, facts.kv_factor)
    elif profile is not None:
        sizes, named_dtype = profile.geometry, getattr(torch, str(profile.namespace["kv_dtype"]), None)
        dtype = named_dtype if isinstance(named_dtype, torch.dtype) else torch.bfloat16
        geometry = KvGeometry(sizes.num_layers, sizes.kv_heads, sizes.head_dim, size)
    blocks = arguments.pool_bytes // (geometry.bytes_per_token(dtype) * size)
    if not blocks:
        raise ConfigurationError(
            f"--pool-bytes is {arguments.pool_bytes}, less than a block of {size} tokens of "
            f"{geometry.bytes_per_token(dtype)} bytes; raise it"
        )
    return PoolFacts(geometry, blocks, dtype, chunk=chunk)


def _replayed(arguments: argparse.Namespace, encoder: Encoder, pool: PoolFacts, figures: list[Figures]) -> Skipped:
    """Serve all prompts under each of the terms, whose figures follow; return what was passed over."""
    from itertools import islice

    from tqdm import tqdm

    from validation.estimate.figures import PrefixCache
    from validation.estimate.prompts import HEAD_BYTES, PromptLog, encoded

    alone = PrefixCache(pool)
    try:
        opened = open_input(arguments.file, may_be_pipe=True, buffering=HEAD_BYTES)
    except OSError as error:
        why = f"{arguments.file} cannot be read ({error.strerror or error}); name a file of prompts"
        raise ConfigurationError(why) from None
    with opened as file:
        total = os.fstat(file.fileno()).st_size or None
        with tqdm(total=total, unit="B", unit_scale=True, desc="prompts", leave=False, disable=None) as bar:
            log = PromptLog(file, encoder, arguments.format)
            for prompt, tokens in encoded(islice(log, arguments.limit), encoder):
                bar.update(log.skipped.bytes - bar.n)
                if len(tokens):
                    prefix = alone.serve(prompt.namespace, tokens)
                    for each in figures:
                        each.add(len(tokens), prefix, each.serving.serve(prompt.namespace, tokens))
    return log.skipped


def _shown(report: dict[str, Any]) -> str:
    shares, memory = report["shares"], report["memory"]
    parts = [
        f"{report['prompts']:,} prompts of {report['tokens']:,} tokens, the longest {report['longest_prompt']:,}; room "
        f"for {memory['pool_tokens']:,} tokens in the engine's pool and {memory['host_tokens']:,} of donors",
        _columns(
            ("held tokens", "share of all"),
            [
                ("by an exact prefix cache", f"{shares['prefix_cache']:.1%}"),
                ("added by donors", f"{shares['added']:+.1%}"),
                ("together", f"{shares['together']:.1%}"),
            ],
        ),
    ]
    if compared := report.get("compared"):
        rows = [(each["terms"], f"{each['shares']['added']:+.1%}") for each in (report, compared)]
        parts.append(_columns(("added by donors, by the terms of reuse", "share of all"), rows))
    times = report["expected_ttft"]
    names = {"cold": "cold", "prefix_cache": "prefix cache", "with_donors": "moved text, unchecked"}
    names["with_checked_donors"] = "moved text, all of it checked"
    expected = [
        (text, *(f"{each:,.1f}" for each in times[name].values())) for name, text in names.items() if name in times
    ]
    parts.append(_columns(("expected TTFT in ms", "mean", "p50", "p95"), expected))
    without = ", ".join(f"{number:,} {reason}" for reason, number in report["prompts_without_donors"].items())
    parts += [f"Prompts without donors: {without}."] if without else []
    if shares["added"] < 0.0:
        parts.append(
            "Donors cost more than they add here: KV after moved text stays out of the prefix cache, and prompts that "
            "go on from there lose it."
        )
    if memory["evicted_donors"]:
        parts.append(
            f"Donors that went for want of room: {memory['evicted_donors']:,}; raise --host-bytes to keep them."
        )
    parts.append(f"{times['extrapolated_share']:.0%} of the prompts lie outside of what the times were fitted to.")
    return "\n\n".join(parts)


def _columns(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return lines of cells under their headings; all but the first are right-aligned."""
    table = [headings, *rows]
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))])
        for name, *cells in table
    )
