"""A yardstick beside our connector: LMCache with CacheBlend in vLLM, on a shifted document and on trap prompts.

`python -m benchmarks.vllm.lmcache --json DIR` times prompts cold and blended, and with `--answers FOLDER` it compares
a model's answers. What LMCache did not serve has no figure.
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.bench_model import DONOR_INSTRUCTION, INSTRUCTION, NEW_TOKENS, QUESTION, Prompts, label, write_config
from benchmarks.program import parser_of
from benchmarks.vllm.arm import SERVED_SHARE
from semblend_trt.errors import ConfigurationError
from validation.cases import TokenisedCase, Tokeniser
from validation.families.catalog import FamilyRequest, write_cases
from validation.metrics import exact_match
from validation.results import Results
from validation.vllm_engine import VllmEngines

# The recipe of CacheBlend's paper (Yao et al. 2025): 15 % of the tokens, chosen at the second layer.
RATIO, CHECK_LAYER = 0.15, 1
# A control, whose answers do not depend on the text before a segment, and the trap.
FAMILIES = ("reordered", "header_trap")
# Rows of numbers never hold it.
_MARKS = " # # # #"
# Beside vLLM's cache lie LMCache's buffers on the card: three times one layer of the prompt.
_CARD_SHARE = 0.6
# The KV of three of the longest prompts, and of small ones beside them.
_HOST_GIB = 6
# LMCache counts its own tables of angles by this; Qwen2.5-7B-Instruct has this number of positions.
_POSITIONS = 32_768
# Tokens of the prompts that are timed, room for new tokens and the marks, and runs before and of a median.
_SIZE, _ROOM, _WARM_UPS, _REPEATS = 24_576, 1_024, 2, 7
_ANSWER_TOKENS, _GROUPS, _QUESTIONS, _TOKENS = 8, 6, 4, 1_024


class Segments:
    """What LMCache has kept of the prompts served so far. `separator`: the token ids between two segments."""

    def __init__(self, separator: Sequence[int]) -> None:
        self.separator = list(separator)
        self._kept: set[tuple[int, ...]] = set()

    def join(self, *segments: Sequence[int]) -> list[int]:
        """Return a prompt of these segments."""
        first, *others = segments
        return [*first, *(token for each in others for token in (*self.separator, *each))]

    def of(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the prompt's segments in order."""
        length, begin, found = len(self.separator), 0, list[tuple[int, ...]]()
        for index in range(len(prompt) - length + 1):
            if index >= begin and list(prompt[index : index + length]) == self.separator:
                found.append(tuple(prompt[begin:index]))
                begin = index + length
        return [*found, tuple(prompt[begin:])]

    def keep(self, prompt: Sequence[int]) -> None:
        """Record that the prompt was computed, and that LMCache kept it."""
        self._kept.update(self.of(prompt))

    def missing(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the segments before the last that are not kept."""
        return [each for each in dict.fromkeys(self.of(prompt)[:-1]) if each not in self._kept]


class LmcacheEngine:
    """vLLM with LMCache's connector as CacheBlend needs it: eager, no prefix cache of vLLM's, a prompt in one step."""

    def __init__(self, folder: Path, separator: str, longest: int, **options: Any) -> None:
        """Tokens of `separator` after the first separate segments. `longest`: tokens a prompt. Raises as vLLM does."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or LMCache would not find the model
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        os.environ |= {"LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        _register_models()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.segments = Segments(AutoTokenizer.from_pretrained(str(folder)).encode(separator)[1:])
        settings = {
            "enable_blending": True,
            "use_layerwise": True,
            "save_unfull_chunk": True,
            "blend_special_str": separator,
            "blend_check_layers": [CHECK_LAYER],
            "blend_recompute_ratios": [RATIO],
            "max_local_cpu_size": _HOST_GIB,
        }
        self._llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,  # or blended KV would be taken for exact
            async_scheduling=False,
            max_model_len=longest,
            max_num_batched_tokens=longest,  # LMCache keeps a segment of one step only
            max_num_seqs=8,
            gpu_memory_utilization=_CARD_SHARE,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="LMCacheConnectorV1",
                kv_role="kv_both",
                kv_connector_extra_config={f"lmcache.{name}": value for name, value in settings.items()},
            ),
            **options,
        )

    def ask(self, prompt: list[int], new_tokens: int = 1, *, keeps: bool = True, stop: Sequence[int] = ()) -> Any:
        """Return vLLM's output of one prompt, of which LMCache keeps what it can if `keeps`."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=not stop,
            stop_token_ids=list(stop) or None,
            detokenize=False,
            extra_args=None if keeps else {"kv_transfer_params": {"lmcache.skip_save": True}},
        )
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if keeps and not output.num_cached_tokens:  # what little follows a hit is not always kept
            self.segments.keep(prompt)
        return output

    def prepare(self, prompt: list[int]) -> None:
        """Serve, in a prompt of its own, what LMCache would stop at in this one."""
        if missing := self.segments.missing(prompt):
            self.ask(self.segments.join(*missing))


def measure_ttft(rows: Results) -> None:
    """Add times of long prompts over random weights: cold, and with a document that was elsewhere before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, max_position_embeddings=_POSITIONS)
        write_tokenizer(folder)
        engine = LmcacheEngine(folder, _MARKS, _SIZE + _ROOM, load_format="dummy")
        prompts, segments = Prompts(int(config.vocab_size)), engine.segments
        document = prompts.fresh(_SIZE - NEW_TOKENS - 2 * len(segments.separator))

        def shifted() -> list[int]:
            prompt = segments.join(prompts.fresh(INSTRUCTION), document, prompts.fresh(QUESTION))
            engine.prepare(prompt)
            return prompt

        cold, _ = _times(engine, lambda: prompts.fresh(_SIZE), keeps=False)
        donor = segments.join(prompts.fresh(DONOR_INSTRUCTION), document, prompts.fresh(NEW_TOKENS - DONOR_INSTRUCTION))
        engine.ask(donor)
        blended, cached = _times(engine, shifted)
        check_served(sum(cached), len(document) * len(cached))
        add_times(rows, cold, blended, cached)


def measure_answers(rows: Results, folder: Path) -> None:
    """Add exact match of a model's answers to families of prompts, cold and blended. Segments are lines, so that
    rows can be taken from under another header. Donors are served as they are, and the lines that they lack in a prompt
    of their own."""
    model = VllmEngines(str(folder))
    tokeniser = Tokeniser(model, _ANSWER_TOKENS)
    cases = {name: write_cases(model, FamilyRequest((name,), _GROUPS, _QUESTIONS, _TOKENS)) for name in FAMILIES}
    engine = LmcacheEngine(folder, line_separator(folder), model.facts.max_positions)
    # Nothing is kept yet, so that nothing can be taken.
    cold = {
        name: [_answer(engine, tokeniser, tokeniser.tokenise(case), keeps=False)[0] for case in asked]
        for name, asked in cases.items()
    }
    for name, asked in cases.items():
        texts, cached, prompt_tokens, kept = list[str](), 0, 0, 0
        for case in asked:
            tokens = tokeniser.tokenise(case)
            if case.is_timed:  # the first of those that share their donors
                for donor in tokens.donors:
                    engine.ask(donor)
            engine.prepare(tokens.prompt)
            text, taken = _answer(engine, tokeniser, tokens)
            texts.append(text)
            cached += taken
            prompt_tokens += len(tokens.prompt)
            kept += len(tokens.prompt) - len(engine.segments.of(tokens.prompt)[-1])
        check_served(cached, kept)
        references, theirs = [case.reference for case in asked], [case.donor_answer for case in asked]
        baseline = (
            f"cold {_matches(cold[name], references):.3f}; {len(asked)} prompts, {_matches(texts, theirs):.3f} "
            f"answered as the donor says; {cached:,} of {prompt_tokens:,} tokens from LMCache, a segment a line; "
            f"{_engine()}"
        )
        row = f"vllm_lmcache_em_{name}_{folder.name}"
        rows.add(row, _matches(texts, references), "exact match", baseline, better="higher")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows the marks between segments, for prompts that are made of numbers."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "#": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(str(folder))


def line_separator(folder: Path) -> str:
    """Return a text whose tokens, but for the first, which LMCache leaves out, are a line's end. Raises
    ConfigurationError for a tokenizer that has no token of its own for a line's end."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    end = tokenizer.encode("\n", add_special_tokens=False)
    found = next((text for text in ("\n", "a\n") if end and tokenizer.encode(text)[1:] == end), None)
    if found is None:
        raise ConfigurationError(f"The tokenizer of {folder} has no token of its own for the end of a line.")
    return found


def _register_models() -> None:
    """Register the model that vLLM loads with LMCache: CacheBlend asks for it (LMCache#4131)."""
    name = import_module("lmcache.integration.vllm.utils").ENGINE_NAME
    tracker = import_module("lmcache.v1.compute.models.utils").VLLMModelTracker
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    load = worker.load_model

    def load_and_register(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        tracker.register_model(name, self.model_runner.get_model())

    worker.load_model = load_and_register


def _times(
    engine: LmcacheEngine, prompt: Callable[[], list[int]], *, keeps: bool = True
) -> tuple[list[float], list[int]]:
    """Milliseconds of `generate` with one new token, and prompt tokens that were not computed by vLLM."""
    gc.collect()
    times, cached = list[float](), list[int]()
    for _ in range(_WARM_UPS + _REPEATS):
        asked = prompt()
        begin = time.perf_counter()
        output = engine.ask(asked, keeps=keeps)
        times.append((time.perf_counter() - begin) * 1e3)
        cached.append(int(output.num_cached_tokens or 0))
    return times[_WARM_UPS:], cached[_WARM_UPS:]


def _answer(
    engine: LmcacheEngine, tokeniser: Tokeniser, tokens: TokenisedCase, *, keeps: bool = True
) -> tuple[str, int]:
    output = engine.ask(tokens.prompt, _ANSWER_TOKENS, keeps=keeps, stop=tokeniser.stop_token_ids)
    return tokeniser.text(list(output.outputs[0].token_ids)), int(output.num_cached_tokens or 0)


def _matches(texts: Sequence[str], references: Sequence[str | None]) -> float:
    """The share of texts that are their reference."""
    pairs = zip(texts, references, strict=True)
    return statistics.fmean(reference is not None and exact_match(text, reference) for text, reference in pairs)


def check_served(cached: int, kept: int) -> None:
    """Raise SystemExit where a figure would not show LMCache: `kept` of the tokens could have been taken."""
    if cached < SERVED_SHARE * kept:
        raise SystemExit(f"no figure: LMCache served {cached:,} of {kept:,} tokens that it had kept")


def add_times(rows: Results, cold_ms: list[float], blended_ms: list[float], cached: list[int]) -> None:
    """Add the rows of the long prompts; `cached` of their tokens came from LMCache."""
    size, cold, blended = label(_SIZE), statistics.median(cold_ms), statistics.median(blended_ms)
    rows.add(f"vllm_lmcache_cold_ttft_{size}_ms", cold, "ms", f"{_engine()}; nothing kept or taken")
    counts = f"{min(cached):,} of {_SIZE:,} tokens from LMCache in host memory"
    rows.add(f"vllm_lmcache_blended_ttft_{size}_ms", blended, "ms", f"cold {cold:,.1f} ms; {counts}; {_engine()}")
    rows.add(f"vllm_lmcache_blended_ttft_{size}_over_cold", blended / cold, "x", f"{blended:,.1f} over {cold:,.1f} ms")


def _engine() -> str:
    return (
        f"LMCache {version('lmcache')}, CacheBlend {RATIO:.0%} chosen at layer {CHECK_LAYER}, vLLM {version('vllm')} "
        "eager, without its prefix cache"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="compare this model's answers, not times")
    options = parser.parse_args(arguments)
    if options.answers is not None and not (options.answers / "config.json").is_file():
        parser.error(f"{options.answers} holds no config.json; name a model's folder")
    if find_spec("lmcache") is None:
        parser.error("LMCache is not installed; install it beside vLLM")
    rows = Results(arguments, "cuda")
    rows.measured.versions["lmcache"] = version("lmcache")
    if options.answers is None:
        measure_ttft(rows)
        rows.write(options.json, "vllm_lmcache")
    else:
        measure_answers(rows, options.answers)
        rows.write(options.json, f"vllm_lmcache_{options.answers.name}")


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of LMCache may wait for ever
