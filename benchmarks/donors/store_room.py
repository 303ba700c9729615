"""How much room conversations, beams and short answers take in the store of donors.

`python -m benchmarks.donors.store_room` serves the shipped model in the embedded engine: a conversation of 12 turns
beside four documents, in stores of several sizes, and eight answers of one token that might have been long.
`--engine vllm` has vLLM answer one prompt by beam search, and counts the donors that are left.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.program import FOLDER, parser_of
from engine_wrapper.embedded.sampling import SamplingParams
from validation.embedded_engine import ONE_TOKEN, open_llm
from validation.models import load, shipped_model
from validation.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.model_runner import ModelRunner

DOCUMENTS, DOCUMENT_TOKENS = 4, 420
TURNS, QUESTION_TOKENS, TURN_ANSWER_TOKENS = 12, 126, 8
# Stores are tried up to room for so many final sizes of the conversation, to a share of one.
MOST_RATIO, PRECISION = 16.0, 0.05
SHORT_ANSWERS, SHORT_PROMPT_TOKENS, MAX_TOKENS, STORE_TOKENS = 8, 100, 1_000, 6_000
BEAM_WIDTH, BEAM_TOKENS, BEAM_PROMPT_TOKENS = 4, 8, 1_000
MOST_ROOM_RATIO, MOST_BEAM_DONORS = 1.3, 2


def drawn(seed: int) -> Callable[[int], list[int]]:
    """Draws so many token ids."""
    generator = random.Random(seed)
    return lambda count: [generator.randrange(10, 2_000) for _ in range(count)]


class Store:
    """An embedded engine with room for donors of `tokens` tokens in host memory, in which the documents are held."""

    def __init__(self, runner: ModelRunner, tokens: int) -> None:
        facts = runner.facts
        token_bytes = 2 * facts.num_layers * facts.kv_heads * facts.head_dim * 4
        self.some = drawn(0)
        self.llm: LLM = open_llm(
            Path(shipped_model()),
            runner.share(),
            {"HOST_BYTES": str(tokens * token_bytes), "POLICY": "exact"},
            pool_tokens=2 * STORE_TOKENS,
        )
        for _ in range(DOCUMENTS):
            self.serve(self.some(DOCUMENT_TOKENS), ONE_TOKEN)

    @property
    def evicted(self) -> int:
        """Donors that had to make room."""
        return int(self.llm.connector_scheduler.donor_index.catalog.stats().evicted)

    def serve(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The answer, whose request is a donor by then."""
        (output,) = self.llm.generate([prompt], params)
        self.llm.settle()
        return list(output.outputs[0].token_ids)


def documents_survive(runner: ModelRunner, turns: int, room: int) -> bool:
    """Whether a conversation evicts no document from a store with `room` tokens more than these take."""
    params = SamplingParams(max_tokens=TURN_ANSWER_TOKENS, ignore_eos=True)
    store, said = Store(runner, DOCUMENTS * DOCUMENT_TOKENS + room), list[int]()
    with store.llm:
        for _ in range(turns):
            said += store.some(QUESTION_TOKENS)
            said += store.serve(said, params)
        index = store.llm.connector_scheduler.donor_index
        is_held = max(len(each.tokens) for each in index._index._donors.values()) == len(said) - 1
        return is_held and store.evicted == 0


def tokens_of(turns: int) -> int:
    """The conversation's final size."""
    return turns * (QUESTION_TOKENS + TURN_ANSWER_TOKENS)


def room_ratio(runner: ModelRunner, turns: int) -> float:
    """The least room beside the documents, over the conversation's final size, with which it evicts none of them."""
    least, enough = 1 - PRECISION, MOST_RATIO
    while enough - least > PRECISION:
        middle = (least + enough) / 2
        if documents_survive(runner, turns, int(middle * tokens_of(turns))):
            enough = middle
        else:
            least = middle
    return enough


def evicted_by_short_answers(runner: ModelRunner) -> tuple[int, float]:
    """Donors that answers of one token evict, which run at once and may have MAX_TOKENS; how full the store ends."""
    anything = tuple(range(len(runner.tokenizer)))
    store = Store(runner, STORE_TOKENS)
    with store.llm:
        prompts = [store.some(SHORT_PROMPT_TOKENS) for _ in range(SHORT_ANSWERS)]
        store.llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=anything))
        store.llm.settle()
        held = store.llm.connector_scheduler.donor_index.held()
        return store.evicted, held.host_bytes / int(store.llm.connector_worker._settings.host_bytes)


def beam_donors() -> tuple[int, int]:
    """The donors, and their bytes, that one beam search of vLLM leaves."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.sampling_params import BeamSearchParams

    from validation.vllm_engine import TRANSFER, settle

    llm: Any = LLM(
        model=str(shipped_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2_048,
        kv_transfer_config=KVTransferConfig(**TRANSFER, kv_connector_extra_config={"policy": "exact"}),
    )
    core = llm.llm_engine.engine_core.engine_core
    prompts = [{"prompt_token_ids": drawn(0)(BEAM_PROMPT_TOKENS)}]
    llm.beam_search(prompts, BeamSearchParams(beam_width=BEAM_WIDTH, max_tokens=BEAM_TOKENS))
    settle(core, lambda: llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False))
    held = core.scheduler.connector._scheduler._scheduler.donor_index.held()
    core.shutdown()
    return held.donors, held.host_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, serves, prints and writes."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"fewer than {TURNS} are a dry run")
    options = parser.parse_args(arguments)
    if options.turns < 1:
        parser.error(f"--turns {options.turns} is too few; at least 1 is needed")
    rows = Results(arguments, "cpu", dry=options.turns < TURNS)
    folder = FOLDER / str(rows.measured.machine["name"])
    if options.engine == "vllm":
        donors, size = beam_donors()
        told = f"vLLM's beam search of width {BEAM_WIDTH}, {BEAM_TOKENS} tokens behind {BEAM_PROMPT_TOKENS:,}"
        rows.add("beam_donors", donors, "donors", f"{told}; {size / 1e6:.0f} MB", MOST_BEAM_DONORS)
        rows.write(options.json, "store_room_vllm", folder)
        return
    runner = load(None, "cpu", "float32")
    told = (
        f"{options.turns} turns, {tokens_of(options.turns):,} tokens at their end, evict none of {DOCUMENTS} documents"
    )
    rows.add("conversation_room_ratio", room_ratio(runner, options.turns), "x final size", told, MOST_ROOM_RATIO)
    evicted, share = evicted_by_short_answers(runner)
    told = f"{SHORT_ANSWERS} answers of one token with max_tokens={MAX_TOKENS:,}; the store ends {share:.0%} full"
    rows.add("evicted_by_unused_room", evicted, f"of {DOCUMENTS} documents", told, 0)
    rows.write(options.json, "store_room", folder)


if __name__ == "__main__":
    main()
