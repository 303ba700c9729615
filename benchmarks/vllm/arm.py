"""One arm of the benchmark inside vLLM: an engine in this process, and everything that is measured of it.

A measurement is a dict for JSON. Where it was not served as its row says, `problem` holds a sentence.
"""

import gc
import os
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bench_model
from benchmarks.bench_model import BIG, INSTRUCTION, LITTLE, LORA, MLA, NEW_TOKENS, PLAIN, QUESTION, SMOLLM2, Prompts
from benchmarks.program import seconds
from engine_wrapper.vllm.doctor import TRANSFER
from semblend_trt.cost import CostModel
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from validation.calibration.calibration import SAMPLE_EVERY
from validation.calibration.prepared import trial_of
from validation.models import PROFILE_NAME, shipped_model
from validation.vllm_engine import settle

STOCK, POSITION_FIX, VERIFIED = ARMS = ("stock", "position_fix", "verified")
OF_BOUNDS = ("bounded", "never_slower")
# They compare single prompts, whose times a machine's drift would hide: the arms take turns at them.
IN_TURNS = ("ttft", "miss", "apart", *OF_BOUNDS)
PARTS = ("ttft", "miss", "decode", "rag", "arrivals", "contaminated")
# Requests that decode, and tokens of each; steps in which they are alone, and prefills that pass.
_DECODING, _DECODED_TOKENS, _ALONE, _PREFILLS = 8, 512, 64, 10
# Prompts of a turn that count; new tokens of a retrieval prompt, and the number that run together.
_IN_TURN, _MISSES, _NEW_TOKENS, _AT_ONCE = 4, 3, 64, 32
# What `bounded` measures: the share of the tokens that is computed at any deviation, and whether all are compared.
VOLATILE, CHECK_LAYER = "volatile_ms", 3
BOUNDS = {VOLATILE: (0.0, False), "chosen_ms": (0.15, True), "chosen_by_sample_ms": (0.15, False)}
# The share that is computed of retrieval prompts within a bound.
RAG_SHARE = 0.25
# Turns in which prompts are compared that may not pay, the least and the most of each in a turn, and short runs.
_COMPARED_TURNS, _FEW, _MANY, _RUNS = 3, 2, 16, (64, 512)
# Prompts that push others out of vLLM's queue of free blocks.
_OTHERS = 15
# If less than this share of the tokens in donors is reused, a figure says nothing about reuse.
SERVED_SHARE = 0.9
# Tokens of the prompt and of the answer that wake a processor, which runs slowly at first when it has waited.
_WAKING = 16, 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the longest compared prompts and of a document, documents a prompt, retrieval prompts, and turns."""

    long: int = 24_576
    document: int = 1_024
    per_prompt: int = 8
    requests: int = 96
    turns: int = 6
    miss_turns: int = 40
    device_bytes: int = 4 << 30
    model: str = BIG
    compared: tuple[int, ...] = (128, 512, 2_048, 8_192, 24_576)

    @property
    def miss(self) -> int:
        """Tokens of a prompt without a donor."""
        return self.long // 3

    @property
    def observed(self) -> list[int]:
        """Tokens of the prompts of `observations`."""
        return [self.long // 6 * factor for factor in (1, 2, 4, 6, 8)]


SMALL = Sizes(1_536, 128, 3, 12, turns=1, miss_turns=2, device_bytes=1 << 26, model=LITTLE, compared=(1_024,))
OF_SMOLLM2 = Sizes(long=8_192, model=SMOLLM2, compared=Sizes().compared[:-1])


class VllmArm:
    """The arm's engine, started with vLLM's defaults and `options`. `turn` is entered for all that is measured in
    turns; `kv` is one of KV_FORMS."""

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        options: Mapping[str, Any],
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        kv: str = PLAIN,
    ) -> None:
        """Make the model in a folder and start the engine. Raises what vLLM raises when it does not start."""
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.name, self.sizes, self._turn, self._kv = name, sizes, turn, kv
        self._is_stock, small, self._made = name == STOCK, sizes.model == LITTLE, tempfile.TemporaryDirectory()
        self._folder = folder = Path(self._made.name)
        config = bench_model.write_config(folder, sizes.model, is_latent=kv == MLA)
        longest = sizes.observed[-1] + 1_024
        given: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32" if small else "bfloat16",
            "max_model_len": longest,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **bench_model.OPTIONS[kv],
        }
        if not self._is_stock:
            settings = {
                "policy": name,
                # A boundary saves nothing where it computes all; else the default, by which costs are measured.
                "min_saving": 0 if name == ReusePolicy.BOUNDARY.value else 0.1,
                **({"risk": 0.5} if name == VERIFIED else {}),  # as in `trial_of`: its bound is twice a floor of 0.5
                "device_bytes": sizes.device_bytes,
                "host_bytes": 2 * sizes.device_bytes,
                "model_revision": "random",
                "tokenizer_revision": "none",
                "embedder": "off",  # there is no tokenizer, so that an embedder has no text
            }
            given["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=settings)
        # What is asked with: no adapter, or one of these.
        self._adapters = [bench_model.adapter_in(folder, config, number) for number in (1, 2)] if kv == LORA else []
        self._adapter = next(iter(self._adapters), None)
        self._llm = LLM(**given | dict(options))
        self._engine = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._vocabulary, self._asked = int(self._engine.vllm_config.model_config.get_vocab_size()), 0
        self.prompts = Prompts(self._vocabulary)
        self._profile = ReuseProfile.read(shipped_model() / PROFILE_NAME)
        assert self._profile.check is not None
        sample = {"sample_every": SAMPLE_EVERY, "sample_threshold": self._profile.check.threshold}
        self._sampled = self._profile.check.model_copy(update=sample)
        sampled = self._profile.model_copy(update={"check": self._sampled})
        self._profiles = {"shifted_ms": self._profile, "sampled_ms": sampled}
        self._profiles |= {name: self._trial(*terms) for name, terms in BOUNDS.items()}
        self.use_profile("shifted_ms")
        self._costs: CostModel | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return what engine it is, for JSON."""
        import vllm

        config = self._engine.vllm_config
        namespace = None if self._is_stock else self._scheduler.namespace
        return {
            "vllm": vllm.__version__,
            "model": f"{bench_model.SHAPES[self._kv]}, dummy weights" if self.sizes.model == BIG else self.sizes.model,
            "kv": self._kv,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "runner": self._llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)[0],
            "enforce_eager": bool(config.model_config.enforce_eager),
            "layers": config.model_config.hf_config.num_hidden_layers,
            "block_size": config.cache_config.block_size,
            "engine_key": None if namespace is None else namespace.backend_cache_layout,
            "checks": f"{self._profile.check}; for sampled_ms {self._sampled}" if self.name == VERIFIED else None,
        }

    def _trial(self, share: float, compares_all: bool) -> ReuseProfile:
        """A profile that computes this share of the checked tokens at any deviation."""
        own = ProfileCheck(layer=CHECK_LAYER, threshold=1.0, sample_threshold=1.0, sample_every=SAMPLE_EVERY)
        changed = {"check": own.model_copy(update={"compares_all": compares_all}), "floor": 0.5}
        return trial_of(self._profile.model_copy(update=changed), share)

    def begin(self, *, declines: bool = False) -> str | None:
        """Serve a first prompt, by which our connector checks itself; return why nothing is reused, if so.

        `declines`: what does not pay is declined from then on."""
        with self._turn(), self.watched() as served:
            for adapter in reversed(self._adapters):  # vLLM loads an adapter with its first request
                self._adapter = adapter
                self.ask(self.prompts.fresh(_WAKING[0]))
            self.save(self.prompts.fresh(self.sizes.long))
        if not self._is_stock and not declines:
            # But in `never_slower` what reuse takes is measured also where it is slower.
            runtime = self._scheduler._runtime
            self._costs, runtime.costs = runtime.costs, None
        return problem_of(served)

    def close(self) -> None:
        """End the engine, and remove its model."""
        self._engine.engine_core.shutdown()
        self._made.cleanup()

    def ask(self, prompt: list[int], new_tokens: int = 1) -> Any:
        """Return vLLM's output of a prompt through `generate`."""
        asked, params = [{"prompt_token_ids": prompt}], self._params(new_tokens)
        [output] = self._llm.generate(asked, params, use_tqdm=False, lora_request=self._adapter)
        return output

    def save(self, prompt: list[int]) -> None:
        """Ask a prompt, and wait until its KV is saved."""
        self.ask(prompt)
        self.settle()

    def answer(self, prompt: list[int], new_tokens: int, **options: Any) -> tuple[float, Any]:
        """Return milliseconds to the first token, and vLLM's output at the end; `options` are of SamplingParams."""
        begin = time.perf_counter()
        self._add(prompt, new_tokens, **options)
        while not (outputs := self._engine.step()):
            pass
        ttft = (time.perf_counter() - begin) * 1e3
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step() or outputs
        return ttft, outputs[-1]

    def settle(self) -> None:
        """Wait until what has ended is saved and in its tier, by steps of short requests. Raises SemBlendError."""
        settle(self._core, lambda: self.ask([0]))

    def forget(self) -> None:
        """Empty vLLM's prefix cache, and drop all donors."""
        self._engine.reset_prefix_cache(reset_connector=True)

    def serve(
        self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """Serve prompts, _AT_ONCE at a time or each at its arrival in seconds from now; return answers and figures."""
        waiting, asked, first = deque(range(len(prompts))), dict[str, float](), dict[str, float]()
        done: dict[str, Any] = {}
        begin = time.perf_counter()
        while waiting or len(done) < len(asked):
            now = time.perf_counter() - begin
            while waiting and (len(asked) - len(done) < _AT_ONCE if arrivals is None else arrivals[waiting[0]] <= now):
                index = waiting.popleft()
                asked[self._add(prompts[index], _NEW_TOKENS)] = now if arrivals is None else arrivals[index]
            if arrivals is not None and len(done) == len(asked):
                time.sleep(max(0.0, arrivals[waiting[0]] - now))
                continue
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - begin)
                if output.finished and output.request_id in asked:
                    done[output.request_id] = output
        took = time.perf_counter() - begin
        self.settle()
        return [list(done[name].outputs[0].token_ids) for name in asked], {
            "requests": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "cached_tokens": sum(each.num_cached_tokens or 0 for each in done.values()),
            "requests_per_s": len(prompts) / took,
            "ttft_ms": [1e3 * (first[name] - asked[name]) for name in asked],
        }

    @contextmanager
    def watched(self) -> Iterator[dict[str, Any]]:
        """Say, once the block is left, how our connector served the requests within it: nothing of stock vLLM."""
        found, before = dict[str, Any](), self._last
        yield found
        found |= self._counts(range(before + 1, self._last + 1))

    def _counts(self, numbers: Iterable[int]) -> dict[str, Any]:
        """How the requests of these numbers were served."""
        if self._is_stock:
            return {}
        runtime, index = self._scheduler._runtime, self._scheduler.donor_index
        reports = map(self._scheduler.outcomes.of, numbers)
        known = [each for each in reports if each is not None and each.reason != "short_prompt"]
        return {
            "outcomes": dict(Counter(each.outcome for each in known)),
            "reasons": dict(Counter(each.reason for each in known if each.reason)),
            "faults": dict(runtime.faults),
            "refusal": runtime.refusal,
            "mode": runtime.mode.value,
            "donors": 0 if index is None else index.held().donors,
            "largest_kept": max((each.largest_kept or 0.0 for each in known), default=0.0),
            "sampled": _sums([each for each in known if each.sampled_tokens]),
        } | _sums(known)

    def ttft(self) -> dict[str, Any]:
        """Measure the long prompt: cold and after an exact prefix in stock vLLM, else after another first block."""
        names = ("shifted_ms", "sampled_ms") if self.name == VERIFIED else ("shifted_ms",)
        return self._long(names) | {"check": self._sampled.model_dump(mode="json")}

    def bounded(self) -> dict[str, Any]:
        """Measure the same with bounds whose levels say BOUNDS at any deviation."""
        return self._long(BOUNDS) | {"layers": self.facts["layers"]}

    def never_slower(self) -> dict[str, Any]:
        """Measure prompts of many lengths: cold in stock vLLM, else as runs of a donor. What does not pay is declined.
        `ms`: by tokens and, in runs, by a run's tokens."""
        found: dict[str, Any] = {"model": self.sizes.model, "ms": {}, "served": {}, "problem": None}
        if not self._is_stock:
            self.use_profile(VOLATILE)
            self._scheduler._runtime.costs = self._costs
            found["problem"] = None if self._costs else "what plans cost was not measured"
        for size in self.sizes.compared:
            document, longest = self.prompts.fresh(size), size - INSTRUCTION
            runs = sorted({run for run in (*_RUNS, size * 3 // 4, longest) if run <= longest})
            makers = {str(run): partial(self.prompts.in_runs, document, size, run) for run in runs}
            makers = {"cold": partial(self.prompts.fresh, size)} if self._is_stock else makers
            with self._turn():
                self.save(self.prompts.donor(document))
            times, served = self._times(makers, _COMPARED_TURNS, max(_FEW, min(_MANY, self.sizes.long // size)))
            found["ms"][str(size)], found["served"][str(size)] = times, served
        return found

    def _long(self, names: Iterable[str]) -> dict[str, Any]:
        """Times of the long prompt, cold and after an exact prefix in stock vLLM, else moved and by these profiles."""
        size = self.sizes.long
        document = self.prompts.document(size)
        with self._turn():
            self.save(self.prompts.donor(document) if not self._is_stock else document)
        makers: dict[str, Callable[[], list[int]]] = dict.fromkeys(names, lambda: self.prompts.shifted(document))
        if self._is_stock:
            makers = {
                "cold_ms": lambda: self.prompts.fresh(size),
                "exact_hit_ms": lambda: document + self.prompts.fresh(NEW_TOKENS),
            }
        with self.watched() as served:
            times, served_of = self._times(makers)
        asked, problems = self.sizes.turns * (1 + _IN_TURN), list[str | None]()
        for name, each in served_of.items():
            # Short gaps between chosen tokens are computed too.
            kept = 1 - 3 * BOUNDS[name][0] if name in BOUNDS else 1
            problems.append(problem_of(each, round(len(document) * asked * kept)))
            wanted = 0 if name == "shifted_ms" else asked
            if each and (sampled := each["sampled"]["requests"]) != wanted:
                problems.append(f"{sampled} checks of {name} had a sample, and {wanted} should have one")
        problem = next(filter(None, problems), None)
        return {"tokens": size, **times, "served": served, "served_of": served_of, "problem": problem}

    def miss(self) -> dict[str, Any]:
        """Measure prompts that were never asked before, one directly after the other: each is saved while the next
        runs. `ms`: a list for each turn, without its first prompt, beside which nothing is saved."""
        found: dict[str, Any] = {"tokens": self.sizes.miss, "ms": []}
        with self.watched() as served:
            for _ in range(self.sizes.miss_turns):
                gc.collect()
                prompts = [self.prompts.fresh(self.sizes.miss) for _ in range(1 + _MISSES)]
                with self._turn():
                    self.ask(self.prompts.fresh(_WAKING[0]), _WAKING[1])
                    found["ms"].append([1e3 * seconds(self.ask, prompt) for prompt in prompts][1:])
                    self.settle()
        nothing = "nothing was saved" if served and not served["donors"] else None
        return found | {"served": served, "problem": problem_of(served) or nothing}

    def apart(self) -> dict[str, Any]:
        """Ask for documents that one adapter has left as donors: with it, with another one, and with none. `hits`:
        requests of the others that reused anything; each asks for a document of its own."""
        own, hits, others = self._adapter, 0, [None, *self._adapters[1:]]
        documents = [self.prompts.document(self.sizes.long) for _ in range(1 + 2 * len(others))]
        with self._turn():
            for each in documents:
                self.save(self.prompts.donor(each))
        with self.watched() as of_own:
            self.ask(self.prompts.shifted(documents[0]))
        ways = product(others, (self.prompts.shifted, self.prompts.donor))
        for document, (self._adapter, make) in zip(documents[1:], ways, strict=True):
            with self.watched() as served:
                cached = self.ask(make(document)).num_cached_tokens or 0
            hits += bool(cached or served.get("reused_tokens"))
        self._adapter, problem = own, problem_of(of_own, len(documents[0]))
        return {"hits": hits, "requests": len(documents) - 1, "served": of_own, "problem": problem}

    def observations(self) -> dict[str, Any]:
        """Measure the median time of prompts of several sizes: cold in stock vLLM, else with a document that moved.
        `semblend-trt estimate` makes its latency model of them."""
        seen, problems = [], []
        for size in self.sizes.observed:
            document = self.prompts.document(size)
            if not self._is_stock:
                self.save(self.prompts.donor(document))
            make = partial(self.prompts.fresh, size) if self._is_stock else partial(self.prompts.shifted, document)
            with self.watched() as served:
                [times] = self._times({"shifted_ms": make})[0].values()
            asked = self.sizes.turns * (1 + _IN_TURN)
            problems.append(problem_of(served, len(document) * asked))
            reused = round(served.get("reused_tokens", 0) / asked)
            found = {"ttft_ms": round(statistics.median(times), 3), "computed": size - reused, "reused": reused}
            seen.append(found | {"is_checked": self.name == VERIFIED})
        return {"observations": seen, "problem": next(filter(None, problems), None)}

    def decode(self) -> dict[str, Any]:
        """Measure times between tokens of running requests, alone and while long prompts pass one after the other."""
        sizes = self.sizes
        document = self.prompts.document(sizes.long)
        self.save(self.prompts.donor(document))
        names = [self._add(self.prompts.fresh(sizes.document), _DECODED_TOKENS) for _ in range(_DECODING)]
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
        alone = [gap for _ in range(_ALONE) for gap in step()]
        beside: list[float] = []
        with self.watched() as served:
            for index in range(1 + _PREFILLS):
                prompt = self.prompts.fresh(sizes.long) if self._is_stock else self.prompts.shifted(document)
                passing = self._add(prompt, 1)
                while passing not in ended:
                    gaps = step()
                    beside += gaps if index else []  # the first one warms up
        problem = problem_of(served, len(document) * (1 + _PREFILLS))
        if not ended.isdisjoint(names):
            problem = f"the {_DECODING} running requests ended before the prefills did"
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self.settle()
        return {"tokens": sizes.long, "alone_ms": alone, "ms": beside, "served": served, "problem": problem}

    def rag(self) -> dict[str, Any]:
        """Measure retrieval prompts a second in random order, _AT_ONCE of them all the time."""
        return self._serve_retrieval(2, None)

    def rag_bounded(self) -> dict[str, Any]:
        """Measure other such prompts, with a bound that computes RAG_SHARE of the tokens at any deviation."""
        self.use_bound(None, RAG_SHARE)
        return self._serve_retrieval(6, None, 1 - RAG_SHARE)

    def arrivals(self, per_second: float) -> dict[str, Any]:
        """Measure times to the first token when such prompts come by chance, `per_second` of them."""
        gaps = np.random.default_rng(3).exponential(1 / per_second, self.sizes.requests)
        return {"per_second": per_second} | self._serve_retrieval(5, np.cumsum(gaps).tolist())

    def contaminated(self) -> dict[str, Any]:
        """Ask planned prompts with their answers again, as stock: none may hit more than the tokens before the first
        one that was reused. Asked a third time all of it may be hit, or there was nothing to see."""
        sizes = self.sizes
        drawn = self._retrieval(4, sizes.requests // 6)
        prompts = [self.prompts.fresh(INSTRUCTION) + prompt[INSTRUCTION:] for prompt in drawn]
        with self.watched() as served:
            answers, _ = self.serve(prompts)
        problem = problem_of(served, sizes.per_prompt * sizes.document * len(prompts))
        for _ in range(_OTHERS):
            self.ask(self.prompts.fresh(sizes.miss))
        self.settle()
        again = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        runtime = self._scheduler._runtime
        kept, runtime.refusal = runtime.refusal, runtime.refusal or "benchmark"
        try:
            hits, control = ([self.ask(prompt).num_cached_tokens for prompt in again] for _ in range(2))
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
            "served": served,
            "problem": problem,
        }

    def _times(
        self, makers: Mapping[str, Callable[[], list[int]]], turns: int | None = None, in_turn: int = _IN_TURN
    ) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
        """Milliseconds of the prompts that each of `makers` makes, some of each in a turn, after one that warms up; and
        how all of them were served."""
        times, numbers = {name: list[float]() for name in makers}, {name: list[int]() for name in makers}
        for _ in range(turns or self.sizes.turns):
            prompts = {name: [make() for _ in range(1 + in_turn)] for name, make in makers.items()}
            gc.collect()
            with self._turn():
                self.ask(self.prompts.fresh(_WAKING[0]), _WAKING[1])
                for name, own in prompts.items():
                    self.use_profile(name)
                    before = self._last
                    for prompt in own:
                        # The second token, at which it ends, is not timed.
                        times[name].append(self.answer(prompt, 2)[0])
                        self.settle()
                    del times[name][-len(own)]
                    numbers[name] += range(before + 1, self._last + 1)
        return times, {name: self._counts(each) for name, each in numbers.items()}

    @cached_property
    def _library(self) -> tuple[list[int], list[list[int]], Prompts]:
        """Instruction, documents (served once) and source of questions of retrieval prompts, the same in all arms."""
        prompts, shown = Prompts(self._vocabulary, seed=1), self.sizes.per_prompt
        documents = [prompts.fresh(self.sizes.document) for _ in range(3 * shown)]
        instruction = prompts.fresh(INSTRUCTION)
        for begin in range(0, 3 * shown, shown):
            self.save([*instruction, *chain(*documents[begin : begin + shown]), *prompts.fresh(QUESTION)])
        return instruction, documents, prompts

    def _retrieval(self, seed: int, count: int) -> list[list[int]]:
        """Prompts of documents in random order, after one instruction, with a question of their own."""
        rng, shown = np.random.default_rng(seed), self.sizes.per_prompt
        instruction, documents, prompts = self._library
        drawn = [[documents[index] for index in rng.permutation(3 * shown)[:shown]] for _ in range(count)]
        return [[*instruction, *chain(*each), *prompts.fresh(QUESTION)] for each in drawn]

    def _serve_retrieval(self, seed: int, arrivals: list[float] | None, kept: float = 1.0) -> dict[str, Any]:
        """Serve retrieval prompts; `kept`: the share of their tokens in donors that is to be reused."""
        self.serve(self._retrieval(1, self.sizes.requests // 6))  # warms up
        prompts = self._retrieval(seed, self.sizes.requests)
        gc.collect()
        with self.watched() as served:
            _, found = self.serve(prompts, arrivals)
        problem = problem_of(served, int(kept * self.sizes.per_prompt * self.sizes.document * len(prompts)))
        return found | {"served": served, "problem": problem}

    def _add(self, prompt: list[int], new_tokens: int, **options: Any) -> str:
        self._asked += 1
        name = f"benchmark{self._asked}"
        asked, params = {"prompt_token_ids": prompt}, self._params(new_tokens, **options)
        self._engine.add_request(name, asked, params, lora_request=self._adapter)
        return name

    def _params(self, new_tokens: int, **options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **options)

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler.connector._scheduler._scheduler

    @property
    def _last(self) -> int:
        """Our number of the request that was asked last; 0 in stock vLLM."""
        return 0 if self._is_stock else int(next(copy(self._core.scheduler.connector._scheduler._next_number))) - 1

    def use_bound(self, profile: ReuseProfile | None, share: float) -> None:
        """Have the arm that checks use the one bound of `profile`; None: that computes `share` at any deviation."""
        bounded = profile and profile.model_copy(update={"floor": 0.5})
        self._profiles["bound"] = bounded or self._trial(share, compares_all=False)
        self.use_profile("bound")

    def use_profile(self, measured: str) -> None:
        """Have the arm that checks use the shipped profile, made out to this engine, with the terms of what is
        measured, if it has own ones."""
        # Where the engine is refused, the first prompt tells why.
        if self.name != VERIFIED or self._scheduler.namespace is None or measured not in self._profiles:
            return
        of_engine = {"version", "namespace", "engines", "geometry", "date"}
        terms = {name: value for name, value in self._profiles[measured] if name not in of_engine}
        bench_model.use_profile(self._scheduler, self._folder, **terms)


def problem_of(served: Mapping[str, Any], in_donors: int = 0) -> str | None:
    """Return why requests do not show reuse, by how they were `watched`: `in_donors` of their tokens are in donors."""
    if not served:
        return None
    if served["mode"] != EngineMode.WRAPPER.value or served["refusal"] or served["faults"]:
        return f"mode {served['mode']}, refusal {served['refusal']}, faults {served['faults']}"
    if declined := served["outcomes"].get("backend_declined_reuse"):
        return f"{declined} of {served['requests']} requests were declined: {served['reasons']}"
    reused = served["exact_prefix_tokens"] + served["reused_tokens"]
    if reused < SERVED_SHARE * in_donors:
        return f"{reused} of {in_donors} tokens in donors were reused: {served['outcomes']}, {served['reasons']}"
    return None


def _sums(reports: Sequence[Any]) -> dict[str, int]:
    """Tokens of some requests together, by what became of them."""
    names = ("exact_prefix_tokens", "offered_tokens", "sampled_tokens", "checked_tokens", "reused_tokens")
    return {"requests": len(reports)} | {name: sum(getattr(each, name) or 0 for each in reports) for name in names}
