"""Cases of a log of requests: a request's donors are earlier ones that share text with it."""

from __future__ import annotations

from pathlib import Path

from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input
from validation.cases import Case, Expectation
from validation.estimate.prompts import Encoder, PromptLog, encoded

WORKLOAD = "log"
MOST_DONORS = 3


def log_cases(path: Path, model: str, shortest: int) -> list[Case]:
    """Return a case for each request of a log in JSON lines that shares a run of `shortest` tokens with earlier ones.

    The latest MOST_DONORS of these are its donors. `model`: folder or id, whose template renders chats. Prompts given
    as token ids are left out. Raises ConfigurationError for a log that cannot be read, or in which nothing is shared.
    """
    index, encoder, cases = SpanIndex(), Encoder(model), dict[str, Case]()
    texts: list[str] = []
    try:
        with open_input(path) as file:
            log = PromptLog(file, encoder, "jsonl")
            for prompt, tokens in encoded(log, encoder):
                if not isinstance(prompt.content, str):
                    continue
                shared = index.find(prompt.namespace, tokens, shortest).runs
                latest = sorted({int(run.donor_id) for run in shared})[-MOST_DONORS:]
                if latest:
                    # A line may hold several prompts.
                    name = f"line-{prompt.line}" + (f".{len(texts)}" if f"line-{prompt.line}" in cases else "")
                    known = (tuple(texts[each] for each in latest), prompt.content, None, False, Expectation.ANY)
                    cases[name] = Case(name, WORKLOAD, "any", *known, name)
                index.add(prompt.namespace, str(len(texts)), tokens)
                texts.append(prompt.content)
    except OSError as error:
        raise ConfigurationError(f"--log {path} cannot be read: {error.strerror or error}.") from error
    if not cases:
        raise ConfigurationError(
            f"--log {path}: none of its {len(texts)} prompts shares a run of {shortest} tokens with an earlier one; "
            f"give a longer log, or lower --min-match-length. {log.skipped.sentence()}".strip()
        )
    return list(cases.values())
