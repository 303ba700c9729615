"""The benchmarks' model, the shape of Qwen2.5-7B with random weights made on the spot, prompts for it, and its times.

All times are milliseconds: Transformers cold, the engine cold, and the engine with donors.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config

from benchmarks.program import FOLDER, parser_of
from engine_wrapper.embedded.llm_args import KvCacheConfig
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.layer_schedule import DeviationCheck
from semblend_trt.errors import ConfigurationError
from validation.embedded_engine import ONE_TOKEN, RANDOM_WEIGHTS, open_llm
from validation.results import Results

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from engine_wrapper.embedded.llm import LLM, RequestOutput
    from semblend_trt.ranks import Ranks

# Qwen/Qwen2.5-7B, config.json; positions enough for the longest prompt and its answer.
_QWEN_7B: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# deepseek-ai/DeepSeek-V3, config.json: its attention in as many of its layers without experts as one card holds twice.
_DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 12,
    "first_k_dense_replace": 12,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# For a dry run, which shows that everything runs and says nothing about the model above.
_NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
# Weights so wide that the order in which sums are added does not change which logit is the largest.
_DECIDED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "initializer_range": 0.2,
}
# The size that most goals are set for, and that of prompts without a donor.
GOAL_SIZE, MISS_SIZE = 24_576, 8_192
# New tokens of a shifted prompt: an instruction before the document and a question behind it.
INSTRUCTION, QUESTION = 32, 96
# The donor's instruction has another length, so that the document moves.
DONOR_INSTRUCTION = 40
NEW_TOKENS = INSTRUCTION + QUESTION
CHECKED_PARTS = ("lookup", "move", "check", "read_back", "above", "rest")
# Where rows of a card are written unless another folder is named.
CARD_FOLDER = FOLDER / "h200"
WARM_UPS = 2
PARTS = ("lookup", "move", "forward", "rest")


def make_runner(
    folder: Path, device: str, layers: int | None = None, ranks: Ranks | None = None, *, decided: bool = False
) -> ModelRunner:
    """Makes the model on `device`, bf16 on a card and float32 elsewhere, and writes its config.json to `folder`.

    `layers`: the number of layers of a narrow model, for a dry run. Each of `ranks` keeps its part. With `decided` the
    model is small, in float32, and its answers do not depend on the order in which sums are added.
    """
    narrow = {} if layers is None else _NARROW | {"num_hidden_layers": layers}
    dtype = torch.bfloat16 if device.startswith("cuda") and not decided else torch.float32
    config = write_config(folder, _DECIDED if decided else narrow)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return ModelRunner.from_model(model, folder, ranks=ranks)


def write_config(
    folder: Path, small: Mapping[str, Any] | None = None, *, is_latent: bool = False
) -> Qwen2Config | DeepseekV3Config:
    """Writes the model's config.json to `folder`, for an engine that makes the weights itself; `small` changes it.
    `is_latent`: of the model with latent attention (MLA) in its place."""
    kind, own = (DeepseekV3Config, _DEEPSEEK_V3) if is_latent else (Qwen2Config, _QWEN_7B)
    config = kind(**own | dict(small or {}))
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return config


class Prompts:
    """Draws random token ids below `vocabulary`, so that no two prompts share a prefix."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, self._vocabulary, tokens).tolist()
        return drawn

    def document(self, size: int) -> list[int]:
        """The part that a donor and the shifted prompts of `size` tokens share."""
        return self.fresh(size - NEW_TOKENS)

    def donor(self, document: list[int]) -> list[int]:
        return self.fresh(DONOR_INSTRUCTION) + document + self.fresh(NEW_TOKENS - DONOR_INSTRUCTION)

    def shifted(self, document: list[int]) -> list[int]:
        return self.fresh(INSTRUCTION) + document + self.fresh(QUESTION)


def label(size: int) -> str:
    """24576 as 24k."""
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)


class Stopwatch:
    """Times parts of one engine; on a card by CUDA events, which nothing waits for.

    `lookup`: the host's time in the connector's look-up; `move` and `forward`: from the part's start to its end on the
    stream.
    """

    def __init__(self, llm: Any) -> None:
        executor = llm.executor
        self._cuda = executor.model_runner.device.type == "cuda"
        self._marks: dict[str, list[Any]] = {}
        self._patches = ExitStack()
        self._wrap(executor.connector, "get_num_new_matched_tokens", "lookup", on_card=False)
        self._wrap(executor.connector, "start_load_kv", "move", on_card=self._cuda)
        self._wrap(executor.model_runner, "forward", "forward", on_card=self._cuda)

    def read(self, ttft_ms: float) -> dict[str, float]:
        """Milliseconds of each part of the last request, and of the rest."""
        if self._cuda:
            torch.cuda.synchronize()
        parts = {name: between(*marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return parts | {"rest": ttft_ms - sum(parts.values())}

    def remove(self) -> None:
        """Leaves the engine as it was."""
        self._patches.close()

    def _wrap(self, owner: Any, name: str, part: str, *, on_card: bool) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = mark(on_card)
            result = original(*arguments, **options)
            self._marks.setdefault(part, [begin, mark(on_card)])
            return result

        self._patches.enter_context(mock.patch.object(owner, name, timed))


def mark(on_card: bool) -> Any:
    """The current time: an event on the card's stream, or the host's clock."""
    if not on_card:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Milliseconds between two marks of one kind; events must have been reached."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


class CheckedStopwatch(Stopwatch):
    """Times the parts of a checked forward as well.

    `check`: the layers that all tokens run through, and the comparison; `read_back`: from the deviations on the card to
    the first launch behind them, while the card idles; `above`: the layers for the remaining tokens.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._wrap(DeviationCheck, "decide", "read_back", on_card=self._cuda)

    def read(self, ttft_ms: float) -> dict[str, float]:
        """Milliseconds of each of CHECKED_PARTS. Raises KeyError when no plan was checked."""
        forward, read_back = self._marks["forward"][0], self._marks["read_back"][0]
        parts = super().read(ttft_ms)
        check = between(forward, read_back)
        above = parts.pop("forward") - check - parts["read_back"]
        return parts | {"check": check, "above": above, "rest": parts["rest"] + parts["read_back"]}


@dataclass(slots=True)
class Hits:
    """Times to the first token of prompts with a donor, and the `first` prompt's; `split` are the parts' medians over
    further runs."""

    times: list[float]
    first: float
    reused: int
    computed: int
    split: dict[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return statistics.median(self.times)

    def sentence(self) -> str:
        """For a baseline: where the prompt's tokens came from."""
        return f"{self.reused} tokens reused, {self.computed} computed, donor near"

    def add_split(self, rows: Results, name: str) -> None:
        for part, milliseconds in self.split.items():
            rows.add(f"{name}_{part}_ms", milliseconds, "ms", "its share in the time, another run")


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share. `folder` holds config.json; a median is over `repeats` runs; `longest` and `sizes`
    are tokens of prompts."""

    runner: ModelRunner
    folder: Path
    repeats: int
    prompts: Prompts
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, runner: ModelRunner, folder: Path, repeats: int, sizes: tuple[int, ...]) -> Bench:
        """With prompts of the runner's vocabulary."""
        return cls(runner, folder, repeats, Prompts(int(runner.config.vocab_size)), sizes)

    @property
    def longest(self) -> int:
        return max(self.sizes)

    @contextmanager
    def engine(
        self,
        variables: dict[str, str] | None = None,
        *,
        warm: bool = True,
        room: int = 2,
        batch: int = 8,
        max_num_tokens: int | None = None,
        contract: str = "embedded",
    ) -> Iterator[LLM]:
        """An engine with a pool of `room` of the longest prompts, and at most `batch` requests at once.

        `variables` are the settings of its connector, without SEMBLEND_; without any it has none. `warm` compiles
        the card's kernels. A prompt runs in one forward, or in chunks of `max_num_tokens`.
        """
        with open_llm(
            self.folder,
            self.runner,
            RANDOM_WEIGHTS | variables if variables else None,
            tensor_parallel_size=self.runner.ranks.size,
            max_num_tokens=max_num_tokens or self.longest,
            enable_chunked_prefill=max_num_tokens is not None,
            max_batch_size=batch,
            max_seq_len=self.longest + 64,
            kv_cache_config=KvCacheConfig(max_tokens=room * (self.longest + 64)),
            contract=contract,
        ) as llm:
            if warm:
                llm.warm_up()
            yield llm

    def donor_bytes(self, donors: int) -> int:
        """Bytes of `donors` donors of the longest prompt."""
        facts = self.runner.facts
        token = facts.num_layers * 2 * facts.kv_heads * facts.head_dim * self.runner.dtype.itemsize
        return donors * (self.longest + 64) * token

    def donors_in(self, tier: str, donors: int, policy: str = "position_fix") -> dict[str, str]:
        """Settings of a connector with room for `donors` donors of the longest prompt in one tier, DEVICE or HOST."""
        return {"POLICY": policy, "HOST_BYTES": "0", f"{tier}_BYTES": str(self.donor_bytes(donors))}

    def transformers_cold(self, size: int) -> float:
        """Median time of the model under SDPA, with a cache, from the prompt to the first token on the host."""
        self.runner.model.set_attn_implementation("sdpa")
        times = []
        for _ in range(WARM_UPS + self.repeats):
            ids = torch.tensor([self.prompts.fresh(size)], device=self.runner.device)
            synchronize()
            begin = time.perf_counter()
            with torch.inference_mode():
                int(self.runner.model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[WARM_UPS:])

    def cold(self, llm: LLM, size: int) -> float:
        """Median time to the first token of new prompts."""
        times = [ttft_ms(llm, self.prompts.fresh(size)) for _ in range(WARM_UPS + self.repeats)]
        return statistics.median(times[WARM_UPS:])

    def miss_overhead(self, plain: LLM, connected: LLM, size: int, pairs: int) -> float:
        """Percent that a connector without a donor adds: the median over pairs of runs, each engine first in turn."""
        extra = []
        for index in range(WARM_UPS + pairs):
            order = (plain, connected) if index % 2 else (connected, plain)
            times = {id(llm): ttft_ms(llm, self.prompts.fresh(size)) for llm in order}
            extra.append(100 * (times[id(connected)] / times[id(plain)] - 1))
        return statistics.median(extra[WARM_UPS:])

    def hits(self, llm: LLM, size: int, stopwatch: type[Stopwatch] = Stopwatch, parts: Sequence[str] = PARTS) -> Hits:
        """Serves a donor, then prompts with its document behind another instruction; `parts` are the stopwatch's.

        Raises AssertionError when a prompt was not served from the donor.
        """
        document = self.prompts.document(size)
        ttft_ms(llm, self.prompts.donor(document))
        times = []
        for _ in range(WARM_UPS + self.repeats):
            milliseconds, output = hit(llm, self.prompts.shifted(document), len(document))
            times.append(milliseconds)
        found = Hits(times[WARM_UPS:], times[0], output.reused_tokens, output.computed_tokens)
        watch = stopwatch(llm)
        splits = [watch.read(ttft_ms(llm, self.prompts.shifted(document))) for _ in range(self.repeats)]
        watch.remove()
        found.split = {part: statistics.median([split[part] for split in splits]) for part in parts}
        return found


def parser_of_model(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """The options of every benchmark that makes the model."""
    parser = parser_of(description, CARD_FOLDER)
    parser.add_argument("--layers", type=int, help="a dry run: a narrow model of so many layers, no goals")
    parser.add_argument("--repeats", type=int, default=repeats, help="runs that count for a median")
    return parser


def run_model(
    name: str,
    description: str | None,
    run: Callable[..., None],
    example: str,
    settings: Mapping[str, tuple[Any, str]],
    arguments: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    beside: int = 0,
) -> None:
    """Parses the command line, makes the model and its prompts, calls `run` with them, and writes the rows.

    `settings`: defaults and help of the options that are whole numbers; `run` gets them by name. `size` or `sizes`
    among them are tokens of the prompts, with `beside` more tokens in a forward. `example`: options of a dry run, which
    is offered where torch sees no card. A ConfigurationError of `run` is bad usage.
    """
    parser = parser_of_model(description, repeats)
    for option, (default, told) in settings.items():
        many: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=told, **many)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.layers is None:
        parser.error(f"torch sees no CUDA device; {example} is a dry run without one")
    rows = Results(arguments, device, dry=options.layers is not None)
    given = {name: getattr(options, name) for name in settings}
    sizes = tuple(size + beside for size in given.get("sizes") or [given["size"]])
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(Path(folder), device, options.layers)
        try:
            run(Bench.of(runner, Path(folder), options.repeats, sizes), rows, **given)
        except ConfigurationError as error:
            parser.error(str(error))
    rows.write(options.json, name, CARD_FOLDER)


def hit(llm: LLM, prompt: list[int], least: int) -> tuple[float, RequestOutput]:
    """Milliseconds to the first token of a prompt on an idle card, and its answer; waits for transfers then.

    Raises AssertionError when fewer than `least` tokens are reused.
    """
    synchronize()
    output = llm.generate(prompt, ONE_TOKEN)[0]
    assert output.reused_tokens >= least, f"{output.reused_tokens} tokens reused, {output.reuse_reason}"
    assert output.time_to_first_token is not None
    llm.settle()
    return output.time_to_first_token * 1e3, output


def ttft_ms(llm: LLM, prompt: list[int]) -> float:
    """Milliseconds from the call, on an idle card, to the first token on the host; waits for transfers then."""
    synchronize()
    output = llm.generate(prompt, ONE_TOKEN)[0]
    assert output.time_to_first_token is not None
    synchronize()
    llm.settle()
    return output.time_to_first_token * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
