"""How fast `semblend-trt estimate` reads a log, what memory it takes, and whether an engine then does what it said.

`python -m benchmarks.commands.estimate` writes chats of an instruction, three of 2,000 documents in any order and a
question, and runs the command on half of them and on all of them, each in a process of its own. The embedded engine
serves short ones with the shipped model and the memory that the command was told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.program import Count, run_counted
from validation import models
from validation.embedded_engine import ONE_TOKEN, EmbeddedEngines, drain, open_llm
from validation.estimate.prompts import HEAD_BYTES, Encoder, Prompt, PromptLog, encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.results import Results

PROMPTS, TOKENS, LEAST_RATE = 4_000, 4_096, 300.0
DOCUMENTS, DOCUMENTS_EACH = 2_000, 3
# Of the prompts that the engine serves: donors outgrow their memory, and the engine's own blocks theirs.
SERVED, SERVED_TOKENS, HOST_TOKENS, POOL_TOKENS = 120, 512, 16_384, 8_192
_RUN = """
from argparse import ArgumentParser
from validation.estimate import command
parser = ArgumentParser()
command.configure(parser)
raise SystemExit(command.run(parser.parse_args()))
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command: its time, that of its processors, and the most memory that it held."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    report: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.report["tokens"])


def run(prompts: int, served: int, rows: Results, tokens: int) -> None:
    """Adds the rows for `prompts` prompts of about `tokens` tokens each, and for `served` short ones that the engine
    serves too."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_log(log, prompts, tokens)
        start = estimate(log, 1)
        half, whole = estimate(log, prompts // 2), estimate(log, prompts)
    length = f"{whole.tokens / prompts:,.0f} tokens"
    against = f"{prompts:,} prompts of {length}, without the {start.seconds:.1f} s of a first prompt"
    rate = prompts / max(whole.seconds - start.seconds, 1e-9)
    goal = LEAST_RATE if tokens == TOKENS else None
    rows.add("estimate_prompts_per_s", rate, "prompts/s", against, goal, "higher")
    work = (whole.processor_seconds - start.processor_seconds) / prompts
    rows.add("estimate_processor_ms", work * 1e3, "ms a prompt", f"{against}; of all cores together")
    rows.add("estimate_peak_mib", whole.peak_bytes / (1 << 20), "MiB", f"{against}; donors in 4 GiB of KV")
    grown = (whole.peak_bytes - half.peak_bytes) / (prompts - prompts // 2)
    rows.add("estimate_growth_bytes", grown, "B a prompt", f"the second half of {prompts:,} prompts")
    said, found = said_and_served(served)
    shown = ", ".join(f"{name} {tokens:,} and {found[name]:,}" for name, tokens in said.items())
    against = (
        f"{served:,} prompts of about {SERVED_TOKENS} tokens; tokens by estimate and by embedded engine: {shown}; "
        f"donors in {HOST_TOKENS:,} tokens of KV, a pool of {POOL_TOKENS:,}"
    )
    rows.add("estimate_equals_served", float(said == found), "1 or 0", against, 1.0, "higher")


def said_and_served(prompts: int) -> tuple[dict[str, int], dict[str, int]]:
    """The tokens of each share as the command says them, and as the embedded engine reports them."""
    runner = models.load(None, "cpu", "float32")
    token_bytes = EmbeddedEngines(runner).token_bytes
    host_bytes = str(HOST_TOKENS * token_bytes)
    variables = {"POLICY": "position_fix", "HOST_BYTES": host_bytes, "LOOKUP_DEADLINE_MS": "60000"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_log(log, prompts, SERVED_TOKENS)
        memory = ("--host-bytes", host_bytes, "--pool-bytes", str(POOL_TOKENS * token_bytes))
        said = estimate(log, prompts, *memory, "--kv-bytes-a-token", str(token_bytes)).report
        encoder = Encoder()
        with log.open("rb", buffering=HEAD_BYTES) as file:
            asked = [tokens.tolist() for _, tokens in encoded(PromptLog(file, encoder), encoder)]
    alone, together = (_held_tokens(runner, asked, each) for each in (None, variables))
    shares = {name: round(share * said["tokens"]) for name, share in said["shares"].items()}
    return shares, {"prefix_cache": alone, "added": together - alone, "together": together}


def _held_tokens(runner: ModelRunner, prompts: Sequence[list[int]], variables: dict[str, str] | None) -> int:
    """Tokens of all prompts that the engine did not compute, with our connector where `variables` are given."""
    held = 0
    with open_llm(models.shipped_model(), runner.share(), variables, pool_tokens=POOL_TOKENS) as llm:
        for prompt in prompts:
            output = llm.generate([prompt], ONE_TOKEN)[0]
            if variables is not None:
                drain(llm)
            held += output.cached_tokens + output.reused_tokens
    return held


def write_log(path: Path, prompts: int, tokens: int, seed: int = 0) -> None:
    """Writes so many chats; documents are drawn by Zipf's law, and hold three quarters of a prompt."""
    random = np.random.default_rng(seed)
    words = np.array(sorted(set((files("validation") / "assets" / "excerpt.txt").read_text(encoding="utf-8").split())))
    sample = " ".join(random.choice(words, 4_000))
    part = max(1, tokens * 1_000 // len(Encoder().encode([Prompt(1, "", sample)])[0]))  # a quarter's words
    documents = [" ".join(random.choice(words, part)) for _ in range(DOCUMENTS)]
    shares = np.arange(1, DOCUMENTS + 1) ** -1.0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(prompts):
            chosen = random.choice(DOCUMENTS, DOCUMENTS_EACH, replace=False, p=shares / shares.sum())
            asked = "\n\n".join([*(documents[each] for each in chosen), " ".join(random.choice(words, part))])
            messages = [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": asked}]
            file.write(json.dumps({"model": "model", "messages": messages}) + "\n")


def estimate(log: Path, prompts: int, *options: str) -> Run:
    """Runs the command on the first prompts. Raises CalledProcessError when it fails."""
    figures = log.with_name("figures.json")
    asked = [sys.executable, "-c", _RUN, str(log), "--limit", str(prompts), "--json", str(figures), *options]
    began = time.perf_counter()
    with subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, asked)
    processors = used.ru_utime + used.ru_stime
    return Run(seconds, processors, used.ru_maxrss * 1024, json.loads(figures.read_text()))


main = partial(
    run_counted,
    "estimate",
    __doc__,
    [
        Count("prompts", PROMPTS, "prompts of the log", least=2),
        Count("served", SERVED, "prompts that the engine serves too"),
    ],
    run,
    tokens={"type": int, "default": TOKENS, "help": "about so many tokens a prompt; goals are for %(default)s"},
)

if __name__ == "__main__":
    main()
