"""One arm of the benchmark inside vLLM: an engine in this process, and everything that is measured of it.

A measurement is a dict for JSON. Where it was not served as its row says, `problem` holds a sentence.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter, deque
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.embedded.bench_model import INSTRUCTION, NEW_TOKENS, QUESTION, Prompts, write_config
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ProfileMatcher, ReuseProfile
from validation.calibration.search import SAMPLE_EVERY
from validation.models import PROFILE_NAME, shipped_model
from validation.vllm_engine import TRANSFER, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

STOCK, POSITION_FIX, VERIFIED = "stock", "position_fix", "verified"
ARMS = (STOCK, POSITION_FIX, VERIFIED)
PARTS = ("ttft", "miss", "decode", "rag", "arrivals", "contaminated")
# They compare single prompts, whose times a machine's drift would hide: the arms take turns at them.
IN_TURNS = ("ttft", "miss")
# Of what stands in donors, so much has to be served from them, or a figure says nothing about reuse.
SERVED_SHARE = 0.9
# What the KV cache holds: K and V in 16 bit, the same in e4m3, or latent rows of 576 values (MLA).
PLAIN, FP8, MLA = KV_FORMS = ("plain", "fp8", "mla")
_OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    FP8: {"kv_cache_dtype": "fp8"},
    MLA: {"attention_backend": "FLASH_ATTN_MLA"} if torch.cuda.is_available() else {},
}
# Requests at 80 % of what stock vLLM sustains.
LOAD = 0.8
_SMALL_MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}

_SHAPES = dict.fromkeys(KV_FORMS, "Qwen2.5-7B's shape") | {MLA: "twelve dense layers of DeepSeek-V3's shape"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked: tokens of prompts and documents, and how many of each."""

    long: int = 24_576
    miss: int = 8_192
    document: int = 1_024
    documents: int = 24
    per_prompt: int = 8
    requests: int = 96
    warm_ups: int = 16
    at_once: int = 32
    new_tokens: int = 64
    decoding: int = 8
    decoding_prompt: int = 1_024
    decoding_tokens: int = 512
    alone: int = 64
    prefills: int = 10
    repeats: int = 15
    turns: int = 6
    in_turn: int = 4
    waking_prompt: int = 16
    waking_tokens: int = 64
    miss_turns: int = 40
    misses: int = 3
    donor_device_bytes: int = 4 << 30
    donor_host_bytes: int = 8 << 30

    @property
    def longest(self) -> int:
        return self.long + 1_024


SMALL = Sizes(
    long=1_024,
    miss=512,
    document=128,
    documents=6,
    per_prompt=3,
    requests=8,
    warm_ups=3,
    at_once=4,
    new_tokens=8,
    decoding=3,
    decoding_prompt=64,
    decoding_tokens=64,
    alone=4,
    prefills=2,
    repeats=2,
    turns=2,
    in_turn=2,
    waking_tokens=2,
    miss_turns=2,
    misses=2,
    donor_device_bytes=1 << 26,
    donor_host_bytes=1 << 28,
)


@dataclass(slots=True)
class Answers:
    """Of requests served together, by their order: seconds to the first token and tokens of the answer. `seconds` is
    the time of all; `cached` prompt tokens were not computed, as vLLM counts them."""

    first: list[float]
    tokens: list[list[int]]
    seconds: float
    cached: int


@dataclass(slots=True)
class Served:
    """How our connector served some requests: all zero in stock vLLM."""

    told: dict[str, Any] = field(default_factory=dict)

    def problem(self, in_donors: int) -> str | None:
        """Why the requests do not show reuse: `in_donors` of their tokens stand in donors."""
        told = self.told
        if told["mode"] != EngineMode.WRAPPER.value or told["refusal"] or told["faults"]:
            return f"mode {told['mode']}, refusal {told['refusal']}, faults {told['faults']}"
        declined = told["outcomes"].get("backend_declined_reuse", 0)
        if declined:
            return f"{declined} of {told['requests']} requests were declined: {told['reasons']}"
        reused = told["exact_prefix_tokens"] + told["reused_tokens"]
        if reused < SERVED_SHARE * in_donors:
            return f"{reused} of {in_donors} tokens in donors were reused: {told['outcomes']}, {told['reasons']}"
        return None


class VllmArm:
    """The arm's engine, started with vLLM's defaults and `options`. `turn` is entered for all that is measured in
    turns. `check` changes the check of sampled_ms; `kv` is one of KV_FORMS."""

    def __init__(
        self,
        name: str,
        folder: Path,
        sizes: Sizes,
        options: Mapping[str, Any],
        turn: Callable[[], AbstractContextManager[None]],
        check: Mapping[str, Any],
        *,
        kv: str,
        small: bool,
    ) -> None:
        """Makes the model in `folder`. Raises what vLLM raises when it does not start."""
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.name, self.sizes, self._turn, self._kv = name, sizes, turn, kv
        config = write_config(folder, _SMALL_MODEL if small else None, is_latent=kv == MLA)
        given: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32" if small else "bfloat16",
            "max_model_len": sizes.longest,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **_OPTIONS[kv],
        }
        # There is no tokenizer, without which an embedder has no text.
        self._settings = {
            "policy": name,
            "device_bytes": sizes.donor_device_bytes,
            "host_bytes": sizes.donor_host_bytes,
            "model_revision": "random",
            "tokenizer_revision": "none",
            "embedder": "off",
        }
        if name != STOCK:
            given["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=self._settings)
        self._llm = LLM(**given | dict(options))
        self._engine = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self.prompts = Prompts(int(config.vocab_size))
        self._vocabulary = int(config.vocab_size)
        self._asked = 0
        self._profile = ReuseProfile.read(shipped_model() / PROFILE_NAME)
        assert self._profile.check is not None
        sample = {"sample_every": SAMPLE_EVERY, "sample_threshold": self._profile.check.threshold}
        self._folder, self._sampled = folder, self._profile.check.model_copy(update={**sample, **check})
        if name == VERIFIED:
            self._use_profile("shifted_ms")

    # -- the engine ------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """What engine it is, for JSON."""
        import vllm

        config = self._engine.vllm_config
        runner = self._core.model_executor.driver_worker.worker.model_runner
        graphs = config.compilation_config.cudagraph_mode
        told: dict[str, Any] = {
            "vllm": vllm.__version__,
            "model": f"{_SHAPES[self._kv]}, dummy weights" if self.sizes != SMALL else "a small dry run",
            "kv": self._kv,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "runner": type(runner).__module__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "enforce_eager": bool(config.model_config.enforce_eager),
            "cudagraph_mode": getattr(graphs, "name", str(graphs)),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": config.cache_config.block_size,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "engine_process": "the benchmark's own",
        }
        if self.name != STOCK:
            namespace = self._scheduler.namespace
            told["engine_key"] = None if namespace is None else namespace.backend_cache_layout
            told["connector"] = self._settings
        if self.name == VERIFIED:
            told["profile"] = (
                f"the shipped model's, made for this engine: {self._profile.check}, head_tokens "
                f"{self._profile.head_tokens}; for sampled_ms {self._sampled}; dummy weights are so small that K "
                "and V hardly hang on other tokens, so that nearly all is kept, as of harmless text"
            )
        return told

    def begin(self) -> str | None:
        """Serves a first prompt, which our connector checks itself by; returns why nothing is reused, if so."""
        with self.watched() as served:
            self.ask([self.prompts.fresh(self.sizes.long)])
        self.settle()
        return None if self.name == STOCK else served.problem(0)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.engine_core.shutdown()

    @property
    def is_refused(self) -> bool:
        """Whether nothing is reused any more."""
        return self.name != STOCK and self._scheduler._runtime.refusal is not None

    def ask(self, prompts: Sequence[list[int]], new_tokens: int = 1) -> list[Any]:
        """vLLM's outputs of prompts that are asked together through `generate`."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found: list[Any] = self._llm.generate(asked, self._params(new_tokens), use_tqdm=False)
        return found

    def ttft_ms(self, prompt: list[int]) -> float:
        """Wall time of `generate` with one new token."""
        begin = time.perf_counter()
        self.ask([prompt])
        return (time.perf_counter() - begin) * 1e3

    def settle(self) -> None:
        """Waits until what has ended is saved; steps of short requests tell of it. Raises SemBlendError."""
        settle(self._core, lambda: self.ask([[0]]))

    def serve(
        self, prompts: Sequence[list[int]], new_tokens: int, at_once: int, arrivals: Sequence[float] | None = None
    ) -> Answers:
        """Serves prompts step by step: `at_once` of them all the time, or each at its arrival, in seconds from now."""
        waiting, asked, first = deque(range(len(prompts))), dict[str, float](), dict[str, float]()
        tokens, names, cached = dict[str, list[int]](), list[str](), 0
        begin = time.perf_counter()
        while waiting or len(tokens) < len(names):
            now, running = time.perf_counter() - begin, len(names) - len(tokens)
            while waiting and (running < at_once if arrivals is None else arrivals[waiting[0]] <= now):
                index = waiting.popleft()
                names.append(self._add(prompts[index], new_tokens))
                asked[names[-1]] = now if arrivals is None else arrivals[index]
                running += 1
            if not running:
                assert arrivals is not None
                time.sleep(max(0.0, arrivals[waiting[0]] - now))
                continue
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - begin)
                if output.finished and output.request_id in asked:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                    cached += output.num_cached_tokens or 0
        seconds = time.perf_counter() - begin
        return Answers([first[name] - asked[name] for name in names], [tokens[name] for name in names], seconds, cached)

    @contextmanager
    def watched(self) -> Iterator[Served]:
        """Tells, once the block is left, how the requests within it were served."""
        found, before = Served(), self._last
        yield found
        if self.name == STOCK:
            return
        runtime = self._scheduler._runtime
        reports = [self._scheduler.outcomes.of(number) for number in range(before + 1, self._last + 1)]
        known = [each for each in reports if each is not None and each.reason != "short_prompt"]
        found.told = {
            "requests": len(known),
            "outcomes": dict(Counter(each.outcome for each in known)),
            "reasons": dict(Counter(each.reason for each in known if each.reason)),
            "faults": dict(runtime.faults),
            "refusal": runtime.refusal,
            "mode": runtime.mode.value,
            "held": {} if self._scheduler.donor_index is None else asdict(self._scheduler.donor_index.held()),
        }
        for name in ("exact_prefix_tokens", "offered_tokens", "reused_tokens", "recomputed_tokens"):
            found.told[name] = sum(getattr(each, name) or 0 for each in known)
        found.told["largest_kept"] = max((each.largest_kept or 0.0 for each in known), default=0.0)
        sampled = [each for each in known if each.sampled_tokens]
        found.told["sampled"] = {"requests": len(sampled)}
        for name in ("offered_tokens", "sampled_tokens", "checked_tokens", "reused_tokens"):
            found.told["sampled"][name] = sum(getattr(each, name) or 0 for each in sampled)

    # -- measurements ----------------------------------------------------------------------------------------------

    def ttft(self) -> dict[str, Any]:
        """The long prompt: cold and behind an exact prefix in stock vLLM, else behind another first block."""
        size = self.sizes.long
        document = self.prompts.document(size)
        if self.name == STOCK:
            with self._turn():
                self.ask([document + self.prompts.fresh(NEW_TOKENS)])
            makers = {
                "cold_ms": lambda: self.prompts.fresh(size),
                "exact_hit_ms": lambda: document + self.prompts.fresh(NEW_TOKENS),
            }
            return {"tokens": size, **self._times(makers)}
        with self._turn():
            self.ask([self.prompts.donor(document)])
            self.settle()
        names = ("shifted_ms", "sampled_ms") if self.name == VERIFIED else ("shifted_ms",)
        with self.watched() as served:
            times = self._times(dict.fromkeys(names, lambda: self.prompts.shifted(document)))
        asked = self.sizes.turns * (1 + self.sizes.in_turn)
        problem = served.problem(len(document) * asked * len(names))
        if problem is None and served.told["sampled"]["requests"] != asked * (len(names) - 1):
            problem = f"{served.told['sampled']['requests']} checks had a sample, and {asked} prompts should have one"
        check = self._sampled.model_dump(mode="json")
        return {"tokens": size, **times, "served": served.told, "problem": problem, "check": check}

    def miss(self) -> dict[str, Any]:
        """Prompts that were never asked before, one directly behind the other: each is saved while the next runs.

        `ms` has a list for each turn; the first prompt of a turn, beside which nothing is saved, is not in it.
        """
        found: dict[str, Any] = {"tokens": self.sizes.miss, "ms": []}
        with self.watched() as served:
            for _ in range(self.sizes.miss_turns):
                gc.collect()
                prompts = [self.prompts.fresh(self.sizes.miss) for _ in range(1 + self.sizes.misses)]
                with self._turn():
                    self._wake()
                    found["ms"].append([self.ttft_ms(prompt) for prompt in prompts][1:])
                    self.settle()
        found["served"] = served.told
        if self.name != STOCK:
            saved = served.told["held"]["donors"]
            found["problem"] = served.problem(0) or (None if saved else "nothing was saved")
        return found

    def decode(self) -> dict[str, Any]:
        """Times between the tokens of running requests, alone and while long prompts pass one behind the other."""
        sizes = self.sizes
        document = self.prompts.document(sizes.long)
        self.ask([self.prompts.donor(document)])
        self.settle()
        names = [
            self._add(self.prompts.fresh(sizes.decoding_prompt), sizes.decoding_tokens) for _ in range(sizes.decoding)
        ]
        last: dict[str, float] = {}
        ended: set[str] = set()

        def step() -> list[float]:
            gaps = []
            for output in self._engine.step():
                now = time.perf_counter()
                if output.request_id in names:
                    gaps.append((now - last.get(output.request_id, now)) * 1e3)
                    last[output.request_id] = now
                if output.finished:
                    ended.add(output.request_id)
            return gaps

        while len(last) < len(names):
            step()
        alone = [gap for _ in range(sizes.alone) for gap in step()]
        beside: list[float] = []
        with self.watched() as served:
            for index in range(1 + sizes.prefills):
                stock = self.name == STOCK
                passing = self._add(self.prompts.fresh(sizes.long) if stock else self.prompts.shifted(document), 1)
                while passing not in ended:
                    gaps = step()
                    beside += gaps if index else []  # the first one warms up
        problem = None if self.name == STOCK else served.problem(len(document) * (1 + sizes.prefills))
        if not ended.isdisjoint(names):
            problem = f"the {sizes.decoding} running requests ended before the prefills did"
        self._engine.abort_request(names)
        self._drain()
        return {"tokens": sizes.long, "alone_ms": alone, "ms": beside, "served": served.told, "problem": problem}

    def rag(self) -> dict[str, Any]:
        """Requests a second of retrieval prompts in random order, `at_once` of them all the time."""
        self._warm_rag()
        return self._rag("closed", None)

    def arrivals(self, per_second: float) -> dict[str, Any]:
        """Times to the first token when such prompts come by chance, `per_second` of them."""
        if not hasattr(self, "_documents"):
            self._warm_rag()
        gaps = np.random.default_rng(3).exponential(1 / per_second, self.sizes.requests)
        return {"per_second": per_second} | self._rag("open", np.cumsum(gaps).tolist())

    def contaminated(self) -> dict[str, Any]:
        """Asks planned prompts with their answers again, as stock: none may hit more than the tokens in front of the
        first one that was reused. Asked a third time all of it may be hit, or there was nothing to see."""
        if not hasattr(self, "_documents"):
            self._warm_rag()
        rng, sizes = np.random.default_rng(4), self.sizes
        prompts = [
            self.prompts.fresh(INSTRUCTION) + self._drawn(rng) + self.prompts.fresh(QUESTION)
            for _ in range(sizes.warm_ups)
        ]
        with self.watched() as served:
            answers = self.serve(prompts, sizes.new_tokens, sizes.at_once)
        problem = served.problem(sizes.per_prompt * sizes.document * len(prompts))
        self.settle()
        for _ in range(sizes.repeats):
            self.ask([self.prompts.fresh(sizes.miss)])
        self.settle()
        again = [prompt + answer for prompt, answer in zip(prompts, answers.tokens, strict=True)]
        runtime = self._scheduler._runtime
        kept, runtime.refusal = runtime.refusal, runtime.refusal or "benchmark"
        try:
            hits = [self.ask([prompt])[0].num_cached_tokens for prompt in again]
            control = [self.ask([prompt])[0].num_cached_tokens for prompt in again]
        finally:
            runtime.refusal = kept
        if min(control) <= INSTRUCTION:
            problem = problem or "not even exact prefixes were hit"
        return {
            "prompts": len(prompts),
            "exact_limit_tokens": INSTRUCTION,
            "hits": sum(cached > INSTRUCTION for cached in hits),
            "largest_hit_tokens": max(hits),
            "smallest_exact_hit_tokens": min(control),
            "served": served.told,
            "problem": problem,
        }

    # -- parts of them ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Decodes for a while: a processor that has waited for its turn runs slowly at first."""
        self.ask([self.prompts.fresh(self.sizes.waking_prompt)], self.sizes.waking_tokens)

    def _times(self, makers: Mapping[str, Callable[[], list[int]]]) -> dict[str, list[float]]:
        """Milliseconds of the prompts that each of `makers` makes, some of each in a turn, behind one that warms up."""
        times: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(self.sizes.turns):
            prompts = {name: [make() for _ in range(1 + self.sizes.in_turn)] for name, make in makers.items()}
            gc.collect()
            with self._turn():
                self._wake()
                for name, own in prompts.items():
                    if self.name == VERIFIED:
                        self._use_profile(name)
                    for prompt in own:
                        times[name].append(self.ttft_ms(prompt))
                        self.settle()
                    del times[name][-len(own)]
        return times

    def _warm_rag(self) -> None:
        """Has every document served once, in prompts of their own, and then some prompts in random order. The same
        ones in all arms."""
        sizes, own = self.sizes, Prompts(self._vocabulary, seed=1)
        self._documents = [own.fresh(sizes.document) for _ in range(sizes.documents)]
        self._instruction = own.fresh(INSTRUCTION)
        self._questions = own
        for begin in range(0, sizes.documents, sizes.per_prompt):
            order = range(begin, min(begin + sizes.per_prompt, sizes.documents))
            self.serve([self._retrieval([self._documents[i] for i in order])], 1, 1)
            self.settle()
        rng = np.random.default_rng(1)
        self.serve([self._rag_prompt(rng) for _ in range(sizes.warm_ups)], sizes.new_tokens, sizes.at_once)
        self.settle()

    def _rag(self, kind: str, arrivals: list[float] | None) -> dict[str, Any]:
        sizes, rng = self.sizes, np.random.default_rng(2 if arrivals is None else 5)
        prompts = [self._rag_prompt(rng) for _ in range(sizes.requests)]
        gc.collect()
        with self.watched() as served:
            found = self.serve(prompts, sizes.new_tokens, sizes.at_once, arrivals)
        self.settle()
        in_donors = sizes.per_prompt * sizes.document * len(prompts)
        return {
            "kind": kind,
            "requests": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "cached_tokens": found.cached,
            "seconds": found.seconds,
            "requests_per_s": len(prompts) / found.seconds,
            "ttft_ms": [1e3 * each for each in found.first],
            "warm_up": f"prompts that hold each document once, one after the other; then {sizes.warm_ups} in random "
            "order; the same in all arms",
            "served": served.told,
            "problem": None if self.name == STOCK else served.problem(in_donors),
        }

    def _rag_prompt(self, rng: np.random.Generator) -> list[int]:
        return self._instruction + self._drawn(rng) + self._questions.fresh(QUESTION)

    def _retrieval(self, documents: Sequence[list[int]]) -> list[int]:
        return self._instruction + [token for each in documents for token in each] + self._questions.fresh(QUESTION)

    def _drawn(self, rng: np.random.Generator) -> list[int]:
        """Documents in random order, joined."""
        chosen = rng.permutation(self.sizes.documents)[: self.sizes.per_prompt]
        return [token for index in chosen for token in self._documents[index]]

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self.settle()

    def _add(self, prompt: list[int], new_tokens: int) -> str:
        self._asked += 1
        name = f"benchmark{self._asked}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params(new_tokens))
        return name

    def _params(self, new_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    @property
    def _scheduler(self) -> Any:
        """Our scheduler half for every engine."""
        return self._core.scheduler.connector._scheduler._scheduler

    @property
    def _last(self) -> int:
        """Our number of the request that was asked last; 0 in stock vLLM."""
        if self.name == STOCK:
            return 0
        return int(next(copy(self._core.scheduler.connector._scheduler._next_number))) - 1

    def _use_profile(self, measured: str) -> None:
        """Makes the shipped model's profile one for this engine, whose name only the running engine knows, and has it
        used. The check of what is measured as sampled_ms has a sample."""
        scheduler = self._scheduler
        runtime, namespace = scheduler._runtime, scheduler.namespace
        if namespace is None:
            return  # refused; the first prompt tells why
        check = self._sampled if measured == "sampled_ms" else self._profile.check
        here = ReuseProfile.made_for(namespace, runtime.pool.geometry, policy=ReusePolicy.EXACT)
        own = {name: getattr(here, name) for name in ("version", "namespace", "engines", "geometry", "date")}
        path = self._folder / "reuse-profile.json"
        self._profile.model_copy(update=own | {"check": check}).write(path)
        settings = scheduler._settings.model_copy(update={"profile_path": path, "profile_trial": True})
        scheduler._profiles = ProfileMatcher(settings)

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"
