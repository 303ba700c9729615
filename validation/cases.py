"""Cases: donors that are served first, a prompt, and what is known about its answer; as text and as tokens.

They are written by families, read from a file, or made of a log: there a request's donors are earlier ones."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input, read_input
from semblend_trt.prompts import ChatError, render_chat
from validation import prompts
from validation.engines import Engines, forced_answer
from validation.estimate.prompts import Encoder, PromptLog, encoded


class Expectation(str, Enum):
    """What a correct system does with a case: reuse donors' KV, reuse none, keep the exact prefix, or unknown."""

    REUSE = "reuse"
    NONE = "none"
    EXACT_PREFIX = "exact_prefix"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt. Cases of one `group` share their donors; the TTFT of the first counts.
    With `known_answer`, only `reference` is right. `donor_answer`: the wrong answer that the donors' text gives."""

    id: str
    workload: str
    size: str
    donors: tuple[str, ...]
    prompt: str
    reference: str | None
    known_answer: bool
    expects: Expectation
    group: str
    donor_answer: str | None = None

    @property
    def is_timed(self) -> bool:
        return self.id == self.group


Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key, in the order in which the keys first appear."""
    found: dict[Key, list[Item]] = {}
    for each in items:
        found.setdefault(key(each), []).append(each)
    return found


def groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Return cases by group, in the order in which the groups first appear."""
    return list(grouped(cases, lambda case: case.group).values())


_Text = Annotated[str, Field(min_length=1)]
Form = TypeVar("Form", bound=BaseModel)


# Text as it is, or the messages of a chat.
_Said = _Text | Annotated[list[dict[str, Any]], Field(min_length=1)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: _Said
    id: _Text | None = None
    family: _Text = "prompts"
    group: _Text | None = None
    donors: list[_Said] = []
    reference: _Text | None = None
    donor_answer: _Text | None = None


def read_cases(path: Path, tokenizer: Any = None) -> list[Case]:
    """Read a `_Line` from each line that is not empty; the chat template of `tokenizer` renders messages.

    An id is the line's number by default, and a group its first case's id. Raises ConfigurationError naming file and
    line, also for cases of one group whose donors or families differ."""
    cases: dict[str, Case] = {}
    firsts: dict[str, Case] = {}
    for number, line in enumerate(content_of(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = parsed(_Line, line, where)
        name = fields.id or str(number)
        if name in cases:
            raise ConfigurationError(f"{where}: the id {name!r} is used twice; ids must differ.")
        first = firsts.get(fields.group or name)
        case = cases[name] = Case(
            id=name,
            workload=fields.family,
            size="any",
            donors=tuple(_text_of(each, tokenizer, where) for each in fields.donors),
            prompt=_text_of(fields.prompt, tokenizer, where),
            reference=fields.reference,
            known_answer=fields.reference is not None,
            expects=Expectation.ANY,
            group=name if first is None else first.group,
            donor_answer=fields.donor_answer,
        )
        first = firsts.setdefault(fields.group or name, case)
        if (case.donors, case.workload) != (first.donors, first.workload):
            raise ConfigurationError(
                f"{where}: the group {fields.group or name!r} has other donors or another family in the case "
                f"{first.id!r}; cases of a group share both."
            )
    if not cases:
        raise ConfigurationError(f"{path} holds no case; write one JSON object a line.")
    return list(cases.values())


def _text_of(said: str | list[dict[str, Any]], tokenizer: Any, where: str) -> str:
    if isinstance(said, str):
        return said
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(f"{where}: the model has no chat template for messages; write text instead.")
    try:
        return render_chat({"messages": said}, tokenizer)[0]
    except ChatError as error:
        raise ConfigurationError(f"{where}: the messages cannot be rendered: {error}.") from error


def content_of(path: Path) -> bytes:
    """Read the file. Raises ConfigurationError if that fails."""
    try:
        return read_input(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error


def parsed(form: type[Form], content: bytes, where: str) -> Form:
    """Parse JSON of the form. Raises ConfigurationError, which begins with `where`, for any other content."""
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{where}: {place + ': ' if place else ''}{first['msg']}.") from error


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
                    cases[name] = Case(name, "log", "any", *known, name)
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


# Scoring a reference costs one decode step a token; more than a few dozen add little.
MAX_FORCED_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TokenisedCase:
    """Token ids of a case. `forced`: the reference's, at most MAX_FORCED_TOKENS; None without a reference."""

    donors: tuple[list[int], ...]
    prompt: list[int]
    forced: tuple[int, ...] | None

    @property
    def texts(self) -> tuple[list[int], ...]:
        """The donors', then the prompt."""
        return (*self.donors, self.prompt)


def equal_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the items that both share from the first one on."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


class Tokeniser:
    """The model's tokenizer. `stop_token_ids` hold the mark that ends an answer, if it or its template knows one."""

    def __init__(self, model: Engines, max_tokens: int) -> None:
        """Take the model's tokenizer, for answers of at most `max_tokens`; its context must hold prompt and answer."""
        self._tokenizer: Any = model.tokenizer
        self._context = model.facts.max_positions
        self._max_tokens = max_tokens
        form = prompts.PLAIN
        with suppress(ConfigurationError):  # a template that cannot be used has written no prompt
            form = prompts.form_for(self._tokenizer)
        self._head = form.head
        end = self._tokenizer.get_vocab().get(prompts.END_MARK, form.end_id)
        self.stop_token_ids: tuple[int, ...] = () if end is None else (end,)

    def tokenise(self, case: Case) -> TokenisedCase:
        return self.tokenise_all([case])[0]

    def tokenise_all(self, cases: Sequence[Case]) -> list[TokenisedCase]:
        """Tokenise in order. Raises ConfigurationError for a prompt or donor that is empty or exceeds the context."""
        # All at once, so that fast tokenizers use every core; once each, as cases of a group share their donors.
        texts = list(dict.fromkeys(text for case in cases for text in (*case.donors, case.prompt)))
        ids = dict[str, list[int]]()
        for is_chat in (False, True):
            # A template writes the special tokens itself.
            chosen = [text for text in texts if is_chat is bool(self._head and text.startswith(self._head))]
            found = self._tokenizer(chosen, add_special_tokens=not is_chat)["input_ids"] if chosen else []
            ids |= zip(chosen, found, strict=True)
        tokenised = []
        for case in cases:
            forced = self._tokenizer.encode(case.reference or "", add_special_tokens=False)[:MAX_FORCED_TOKENS]
            tokens = TokenisedCase(tuple(ids[donor] for donor in case.donors), ids[case.prompt], tuple(forced) or None)
            self._check(case, "prompt", tokens.prompt, max(self._max_tokens, MAX_FORCED_TOKENS))
            for number, donor in enumerate(tokens.donors, start=1):
                self._check(case, f"donor {number}", donor, 1)
            tokenised.append(tokens)
        return tokenised

    def sampling(self, forced: Sequence[int] | None) -> SamplingParams:
        """Return how to answer: greedily up to the longest answer, or `forced` token by token; with logits."""
        if forced is not None:
            return forced_answer(forced)
        return SamplingParams(self._max_tokens, stop_token_ids=self.stop_token_ids, return_generation_logits=True)

    def text(self, tokens: Sequence[int]) -> str:
        """Return an answer's text without the mark that ends it and without space around it."""
        kept = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        return str(self._tokenizer.decode(kept, skip_special_tokens=True)).strip()

    def _check(self, case: Case, name: str, tokens: list[int], room: int) -> None:
        if not tokens:
            raise ConfigurationError(f"Case {case.id}: the {name} has no tokens; write some text.")
        if len(tokens) + room > self._context:
            raise ConfigurationError(
                f"Case {case.id}: the {name} has {len(tokens)} tokens and {room} are to be generated, but the model's "
                f"context holds {self._context}; shorten it or choose another model."
            )
