"""A yardstick beside our connector: LMCache's blend server in vLLM, on a shifted document and on changed openings.

`python -m benchmarks.vllm.lmcache --json DIR` times prompts cold and blended, and with `--answers FOLDER` it compares
a model's next tokens. What LMCache did not serve has no figure.
"""

import gc
import os
import statistics
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import BIG, Prompts, label, write_config
from benchmarks.program import parser_of, seconds
from benchmarks.vllm.arm import SERVED_SHARE
from validation.cases import Tokeniser
from validation.families.catalog import FamilyRequest, write_cases
from validation.metrics import kl_divergence
from validation.results import Results
from validation.vllm_engine import VllmEngines

# The opening of both families changes, and all that follows keeps its order.
FAMILIES = ("instruction", "volatile")
# LMCache's default, and what leaves prompts of 1,024 tokens more than two chunks.
_CHUNK, _SMALL_CHUNK = 256, 64
# Tokens of the prompts that are timed, room for new ones, and runs before and of a median.
_SIZE, _ROOM, _WARM_UPS, _REPEATS = 24_576, 1_024, 2, 7
_ANSWER_TOKENS, _GROUPS, _QUESTIONS, _TOKENS = 4, 6, 4, 1_024
# Beside vLLM lie the server's context and buffers.
_CARD_SHARE = 0.6


class BlendEngine:
    """vLLM, eager and with a prompt in one step, and LMCache's server beside it."""

    def __init__(self, folder: Path, chunk: int, longest: int, **options: Any) -> None:
        """Start both; `longest`: tokens a prompt. Raises as vLLM and LMCache do."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from benchmarks.vllm.lmcache_client import BlendConnector, Client, start_server

        self._server = start_server(chunk, Path(os.environ.get("LMCACHE_LOG", os.devnull)))
        self.client = BlendConnector.client = Client()
        connector = {"kv_connector": "BlendConnector", "kv_connector_module_path": BlendConnector.__module__}
        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            async_scheduling=False,
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=8,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**connector, kv_role="kv_both"),
            **{"dtype": "bfloat16", "gpu_memory_utilization": _CARD_SHARE} | options,
        )
        engine = self._llm.llm_engine
        self._block = engine.vllm_config.cache_config.block_size
        model = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        self.client.register_rope(model)
        self._compute, self._seen, self._forced = model.compute_logits, list[torch.Tensor](), list[int]()
        model.compute_logits = self._logits

    def ask(self, prompt: list[int], forced: Sequence[int] = (0,), loads: Sequence[Any] = ()) -> list[torch.Tensor]:
        """Return the logits [vocabulary] of each new token; the answer is `forced`, and of an empty one greedy."""
        from vllm import SamplingParams

        self.client.prompt, self.client.loads, self._seen, self._forced = prompt, list(loads), [], list(forced)
        count = len(forced) or _ANSWER_TOKENS
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        self.answer = list(output.outputs[0].token_ids)
        return self._seen

    def keep(self, prompt: list[int]) -> None:
        """Serve a donor, which LMCache keeps."""
        self.client.keeps = True
        self.ask(prompt)
        self.forget()

    def blended(self, prompt: list[int], forced: Sequence[int] = (0,)) -> list[torch.Tensor]:
        """Return `ask`'s logits after what LMCache holds of the prompt is loaded: vLLM computes the beginning in a
        request of its own, in whole blocks, and the rest in a second one."""
        self.client.prompt, self.client.taken = prompt, 0
        loads = self.client.lookup()
        if loads:
            self.ask(prompt[: -(-loads[0].cur_st // self._block) * self._block])
        found = self.ask(prompt, forced, loads)
        self.client.end()
        return found

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, which takes blended KV for exact."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _logits(self, *arguments: Any, **options: Any) -> Any:
        """Return the model's own, or those that leave the sampler the forced token."""
        logits = self._compute(*arguments, **options)
        self._seen.append(logits[-1].float())
        if self._forced:
            logits = torch.full_like(logits, float("-inf"))
            logits[:, self._forced.pop(0)] = 0.0
        return logits


def measure_ttft(rows: Results) -> None:
    """Add times of long prompts over random weights: cold, and with a document that was elsewhere before."""
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), BIG)
        engine = BlendEngine(Path(name), _CHUNK, _SIZE + _ROOM, load_format="dummy")
        prompts = Prompts(int(config.vocab_size))
        document = prompts.document(_SIZE)
        engine.keep(prompts.donor(document))
        cold_ms, blended_ms, taken = list[float](), list[float](), list[int]()
        for _ in range(_WARM_UPS + _REPEATS):
            cold_ms.append(_milliseconds(engine, engine.ask, prompts.fresh(_SIZE)))
            blended_ms.append(_milliseconds(engine, engine.blended, prompts.shifted(document)))
            taken.append(engine.client.taken)
        engine.close()
    add_times(rows, cold_ms[_WARM_UPS:], blended_ms[_WARM_UPS:], taken[_WARM_UPS:])


def measure_answers(rows: Results, folder: Path) -> None:
    """Add how far a model's next tokens are from cold on prompts whose opening differs from their donor's."""
    model = VllmEngines(str(folder))
    tokeniser = Tokeniser(model, _ANSWER_TOKENS)
    engine = BlendEngine(folder, _SMALL_CHUNK, model.facts.max_positions)
    for name in FAMILIES:
        divergences, floors, taken, asked = list[float](), list[float](), 0, 0
        for case in write_cases(model, FamilyRequest((name,), _GROUPS, _QUESTIONS, _TOKENS)):
            tokens = tokeniser.tokenise(case)
            if case.is_timed:  # the first of those that share their donors
                for donor in tokens.donors:
                    engine.keep(donor)
            cold = torch.stack(engine.ask(tokens.prompt, ()))
            answer = engine.answer
            engine.forget()
            blended = torch.stack(engine.blended(tokens.prompt, answer))
            engine.forget()
            engine.ask(tokens.prompt[: len(tokens.prompt) // 32 * 16])  # the beginning in a request of its own
            halves = torch.stack(engine.ask(tokens.prompt, answer))
            engine.forget()
            divergences.append(kl_divergence(cold, blended))
            floors.append(kl_divergence(cold, halves))
            taken, asked = taken + engine.client.taken, asked + len(tokens.prompt)
        add_divergence(rows, name, folder.name, divergences, floors, taken, asked)
    engine.close()


def _milliseconds(engine: BlendEngine, ask: Any, prompt: list[int]) -> float:
    engine.forget()
    gc.collect()
    return seconds(ask, prompt) * 1e3


def check_served(taken: int, held: float) -> None:
    """Raise SystemExit where a figure would not show LMCache: `held` tokens could have been taken."""
    if taken < SERVED_SHARE * held:
        raise SystemExit(f"no figure: LMCache served {taken:,} of {held:,.0f} tokens that it held")


def add_times(rows: Results, cold_ms: list[float], blended_ms: list[float], taken: list[int]) -> None:
    """Add the rows of the long prompts, of whose tokens `taken` came from LMCache."""
    check_served(min(taken), _SIZE - 2 * _CHUNK)
    size, cold, blended = label(_SIZE), statistics.median(cold_ms), statistics.median(blended_ms)
    rows.add(f"vllm_lmcache_blend_cold_ttft_{size}_ms", cold, "ms", f"{_engine(_CHUNK)}; nothing kept or taken")
    counts = f"{min(taken):,} of {_SIZE:,} tokens from LMCache in host memory"
    rows.add(f"vllm_lmcache_blend_ttft_{size}_ms", blended, "ms", f"cold {cold:,.1f} ms; {counts}; {_engine(_CHUNK)}")
    rows.add(f"vllm_lmcache_blend_ttft_{size}_over_cold", blended / cold, "x", f"{blended:,.1f} over {cold:,.1f} ms")


def add_divergence(
    rows: Results, family: str, model: str, divergences: list[float], floors: list[float], taken: int, asked: int
) -> None:
    """Add the mean KL of a family's prompts, of whose `asked` tokens `taken` came from LMCache."""
    check_served(taken, asked / 2)
    baseline = (
        f"cold; {len(divergences)} prompts, {_ANSWER_TOKENS} tokens of the cold answer; two requests without LMCache "
        f"{statistics.fmean(floors):.2g}; {taken:,} of {asked:,} tokens from LMCache; {_engine(_SMALL_CHUNK)}"
    )
    rows.add(f"vllm_lmcache_blend_kl_{family}_{model}", statistics.fmean(divergences), "nats", baseline)


def _engine(chunk: int) -> str:
    return (
        f"LMCache {version('lmcache')}'s blend engine, chunks of {chunk}, a client of ours, two requests a shifted "
        f"prompt; vLLM {version('vllm')} eager"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="compare this model's next tokens, not times")
    options = parser.parse_args(arguments)
    if options.answers is not None and not (options.answers / "config.json").is_file():
        parser.error(f"{options.answers} holds no config.json; name a model's folder")
    if find_spec("lmcache") is None:
        parser.error("LMCache is not installed; install it beside vLLM")
    rows = Results(arguments, "cuda")
    rows.measured.versions["lmcache"] = version("lmcache")
    if options.answers is None:
        measure_ttft(rows)
        rows.write(options.json, "vllm_lmcache_blend")
    else:
        measure_answers(rows, options.answers)
        rows.write(options.json, f"vllm_lmcache_blend_{options.answers.name}")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads of LMCache may wait for ever
    os._exit(0)
