"""Count how often a gateway sends a text to the worker that answered it first, after other instructions.

It asks a gateway that runs already, as docs/fleet.md starts LiteLLM's: each text after one instruction, then after
four others, at several concurrencies, and reads from `x-litellm-model-id` who answered.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TypeVar

import aiohttp

from benchmarks.program import Count, run_counted
from validation.documents import stock_list
from validation.results import Results

INSTRUCTIONS = ("Answer briefly. ", "Look up what is asked for. ", "Use the lists. ", "Be exact. ", "Say where it is. ")
CONCURRENCIES = (1, 4, 16)
MODEL = "catalogue"  # of docs/litellm.yaml
# Until the last donors have been announced.
SETTLED_SECONDS = 1.0

Prompt = TypeVar("Prompt")
Got = TypeVar("Got")


def prompts_of(texts: int, seed: int) -> list[list[str]]:
    """Return prompts about `texts` texts, each round after another instruction."""
    generator = random.Random(seed)
    lists = ["\n".join(stock_list(generator, rows=12).text for _ in range(4)) for _ in range(texts)]
    return [[instruction + each for each in lists] for instruction in INSTRUCTIONS]


async def gathered(ask: Callable[[Prompt], Awaitable[Got]], prompts: Sequence[Prompt], at_once: int) -> list[Got]:
    """Return what `ask` gets for each prompt, `at_once` at a time."""
    turns = asyncio.Semaphore(at_once)

    async def in_turn(prompt: Prompt) -> Got:
        async with turns:
            return await ask(prompt)

    return await asyncio.gather(*map(in_turn, prompts))


async def routed_to_holder(
    ask: Callable[[Prompt], Awaitable[str]], rounds: Sequence[Sequence[Prompt]], at_once: int
) -> float:
    """Return the share of the later rounds' prompts that the first round's worker answers; `ask` says who answers."""
    answered = list[list[str]]()
    for prompts in rounds:
        answered.append(await gathered(ask, prompts, at_once))
        await asyncio.sleep(SETTLED_SECONDS)
    first, *later = answered
    return fmean(name == holder for names in later for name, holder in zip(names, first, strict=True))


async def shares_of(texts: int, url: str) -> list[float]:
    """Return the share at each of CONCURRENCIES, from a gateway that names who answers as LiteLLM does."""
    headers = {"Authorization": f"Bearer {os.environ['LITELLM_MASTER_KEY']}"}
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as client:

        async def ask(prompt: str) -> str:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                return str(answer.headers["x-litellm-model-id"])

        return [await routed_to_holder(ask, prompts_of(texts, at_once), at_once) for at_once in CONCURRENCIES]


def run(texts: int, results: Results, url: str) -> None:
    """Add the row: the share of the repeats, of the worst concurrency."""
    shares = asyncio.run(shares_of(texts, url))
    each_share = ", ".join(f"{share:.3f} at concurrency {at}" for at, share in zip(CONCURRENCIES, shares, strict=True))
    baseline = f"{texts} texts of four lists behind {len(INSTRUCTIONS)} instructions; {each_share}"
    results.add("litellm_routed_to_holder_share", min(shares), "share", baseline, 0.98, "higher")


main = partial(
    run_counted,
    {"fleet_gateway": run},
    __doc__,
    [Count("texts", 40, "texts that are asked about")],
    url={"default": "http://127.0.0.1:4000", "help": "the gateway (default: %(default)s)"},
)


if __name__ == "__main__":
    main()
