"""What the command lines of `python -m validation` have in common: parser, options, what they ask for and show."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from semblend_trt.command_line import named, printable
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from validation.arms import ALL_NAMES, BOUNDARY, VERIFIED
from validation.cases import Case, log_cases, read_cases
from validation.engines import EMBEDDED, SGLANG, TRTLLM, VLLM
from validation.families.catalog import FAMILIES as ALL_FAMILIES
from validation.families.catalog import FamilyRequest
from validation.measurement import ServingSettings
from validation.models import AUTO, KV_DTYPES, SMOLLM2, SMOLLM2_NAME, shipped_model
from validation.prompts import FORM_NAMES

PROGRAM = "python -m validation"
# The highest seed that every generator of random numbers takes, together with the seeds that follow it.
HIGHEST = 2**32 - 1

_MODEL = f"model folder, hub id, or {SMOLLM2} for {SMOLLM2_NAME} (default: the shipped model)"
_PROMPTS = (
    'cases of your own, one a line: {"id", "family", "group", "donors": [text or messages, ...], "prompt": text or '
    'messages, "reference", "donor_answer"}; only "prompt" must be there, and a donor_answer makes a trap'
)
_LOG = "request bodies of OpenAI's API, one a line: donors of a request are earlier ones that share text with it"
_ENGINE = (
    "where the prompts are served: embedded; vllm, through its LLM class in this process; sglang, through its "
    "scheduler in this process; or, without times, trtllm, which is TensorRT-LLM with the wrapper through its LLM API "
    "(untested on a real one). Only embedded runs on --device; arms of the others are served one after the other"
)
_KV_DTYPE = "the KV cache; auto is that of the weights, and fp8 is e4m3, which trtllm is not asked for"
_ARMS = f"arms, with commas between them: {', '.join(ALL_NAMES)}, boundary_N, epic_N, cacheblend_N, or all"
_PROFILE = f"reuse profile for the arm {VERIFIED} (default: reuse-profile.json in the model's folder, if there)"
_BOUNDARY = f"lowest layers that the arm {BOUNDARY} computes for all tokens (default: a third of the model's)"
_FAMILIES = f"with commas between them: {', '.join(x.name for x in ALL_FAMILIES)} (default: all whose data is there)"

_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"type": named, "metavar": "PATH_OR_ID", "help": _MODEL},
    "--engine": {"choices": (EMBEDDED, TRTLLM, VLLM, SGLANG), "default": EMBEDDED, "help": _ENGINE},
    "--device": {"help": "auto, cpu, cuda or cuda:N (default: auto, but cpu for the shipped model)"},
    "--dtype": {"choices": ("auto", "float32", "bfloat16", "float16"), "default": "auto", "help": "weights and KV"},
    "--kv-dtype": {"choices": KV_DTYPES, "default": AUTO, "help": _KV_DTYPE},
    "--max-tokens": {"type": int, "default": 16, "help": "longest answer, in tokens"},
    "--min-match-length": {"type": int, "default": 64, "help": "shortest run of equal tokens that is reused"},
    "--prompts": {"type": Path, "metavar": "FILE.jsonl", "help": _PROMPTS},
    "--log": {"type": Path, "metavar": "FILE.jsonl", "help": _LOG},
    "--arms": {"type": named, "metavar": "NAMES", "help": _ARMS},
    "--profile": {"type": Path, "metavar": "FILE", "help": _PROFILE},
    "--boundary": {"type": int, "metavar": "LAYERS", "help": _BOUNDARY},
    "--families": {"type": named, "metavar": "NAMES", "help": _FAMILIES},
    "--groups": {"type": int, "default": 50, "help": "groups of questions on the same documents"},
    "--questions": {"type": int, "default": 4, "help": "questions in each group"},
    "--tokens": {"type": int, "default": 1_536, "help": "longest prompt, in tokens"},
    "--seed": {"type": int, "default": 0, "help": "seed of prompts and bootstrap"},
    "--eval-data": {"type": Path, "metavar": "DIR", "help": "folder of evaluation sets"},
    "--form": {"choices": FORM_NAMES, "help": "prompt form (default: what the tokenizer knows)"},
    "--batch": {"type": int, "default": 32, "help": "groups that are served together"},
    "--output": {"type": Path, "metavar": "FILE"},
    "--record": {"type": Path, "metavar": "FOLDER", "help": "write result rows to a file in FOLDER/MACHINE"},
    "--machine": {"help": "name of the machine in result rows (default: cpu-Ncore or the GPU's name)"},
}
MODEL = ("--model", "--engine", "--device", "--dtype", "--kv-dtype", "--max-tokens", "--min-match-length")
FAMILIES = ("--families", "--groups", "--questions", "--tokens", "--seed", "--eval-data", "--form", "--batch")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        is_silent = action.default in (None, argparse.SUPPRESS)
        return (action.help or "") if is_silent else f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """The parser of one command, "" without a first word. Errors are one sentence, without argparse's usage."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        name = f"{PROGRAM} {command}".strip()
        super().__init__(name, None, description, epilog, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"validation: {message[:1].upper()}{message[1:]}. See {self.prog} --help.") + "\n")


def add(group: argparse._ActionsContainer, *names: str, default_in_words: str = "", **changes: Any) -> None:
    """Add options that several commands share, with `changes`; `default_in_words` is the default in words."""
    for name in names:
        action = group.add_argument(name, **{**_OPTIONS[name], **changes})
        action.help = f"{action.help} (default: {default_in_words})" if default_in_words else action.help


def check_integers(options: argparse.Namespace, **lowest: int) -> None:
    """Raise ConfigurationError for an option below its lowest value or above HIGHEST."""
    for name, least in lowest.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < least:
            raise ConfigurationError(f"{option} is {value}; it must be at least {least}.")
        if value > HIGHEST:
            raise ConfigurationError(f"{option} is {value}; it must be at most {HIGHEST}.")


def settings_in_text(options: argparse.Namespace, **others: object) -> dict[str, Any]:
    """Return the options for a report, paths as text; `others` add to them or replace them."""
    settings = vars(options) | others
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def serving_settings(options: argparse.Namespace) -> ServingSettings:
    """Return how to serve prompts. Raises ConfigurationError for a number that is out of its range."""
    counts = ("max_tokens", "min_match_length", "batch", "groups", "questions", "tokens")
    check_integers(options, seed=0, **dict.fromkeys(counts, 1))
    model = str(options.model or shipped_model())
    return ServingSettings(model, options.max_tokens, options.min_match_length, options.batch)


def family_request(options: argparse.Namespace) -> FamilyRequest:
    """Return the prompts that the options ask for. Raises ConfigurationError for an unknown family."""
    names = tuple((options.families or "").replace(",", " ").split())
    same = ("groups", "questions", "tokens", "seed", "eval_data", "form")
    asked = FamilyRequest(names, **{name: getattr(options, name) for name in same})
    asked.family_names()
    return asked


def own_cases(options: argparse.Namespace, tokenizer: Any) -> list[Case]:
    """Return the cases of --prompts, then those of --log; none without either. Raises ConfigurationError."""
    cases = [] if options.prompts is None else read_cases(options.prompts, tokenizer)
    if options.log is not None:
        cases += log_cases(options.log, str(options.model or shipped_model()), options.min_match_length)
    return cases


def beside(path: Path, suffix: str) -> Path | None:
    """Return the path with another suffix; None for a device or pipe. Raises ConfigurationError if not writable."""
    check_writable(path)
    return None if path.exists() and not path.is_file() else path.with_suffix(suffix)


def complain(sentence: str) -> None:
    """Show one line on stderr."""
    sys.stderr.write(printable(f"validation: {sentence}") + "\n")


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a transient progress bar of `steps` steps on stderr; give the function that says what was done last."""
    with tqdm(total=steps, desc=title, leave=False, file=sys.stderr, disable=None) as bar:

        def on_step(last: str) -> None:
            bar.set_postfix_str(printable(last), refresh=False)
            bar.update()

        yield on_step
