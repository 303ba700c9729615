"""Count how often a gateway sends a text to the worker that answered it first, after other instructions.

It asks a gateway that runs already, as docs/fleet.md starts LiteLLM's: each text after one instruction, then after
four others, at several concurrencies, and reads from `x-litellm-model-id` who answered.
"""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.request import Request, urlopen

from benchmarks.program import Count, run_counted
from validation.documents import stock_list
from validation.results import Results

INSTRUCTIONS = ("Answer briefly. ", "Look up what is asked for. ", "Use the lists. ", "Be exact. ", "Say where it is. ")
CONCURRENCIES = (1, 4, 16)
# Until the last donors have been announced.
SETTLED_SECONDS = 1.0


def answerer(url: str, model: str, prompt: str) -> str:
    """Return the id of the deployment that answers."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['LITELLM_MASTER_KEY']}"}
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=300) as answer:
        return str(answer.headers["x-litellm-model-id"])


def run(texts: int, results: Results, url: str, model: str) -> None:
    """Add the row: the share of the repeats, of the worst concurrency."""
    shares = {}
    for concurrency in CONCURRENCIES:
        generator = random.Random(concurrency)
        lists = ["\n".join(stock_list(generator, rows=12).text for _ in range(4)) for _ in range(texts)]
        with ThreadPoolExecutor(concurrency) as threads:
            ask = partial(answerer, url, model)
            first = list(threads.map(ask, [INSTRUCTIONS[0] + each for each in lists]))
            time.sleep(SETTLED_SECONDS)
            repeats = list(threads.map(ask, [start + each for start in INSTRUCTIONS[1:] for each in lists]))
        same = sum(name == first[at % texts] for at, name in enumerate(repeats))
        shares[concurrency] = same / len(repeats)
    each_share = ", ".join(f"{share:.3f} at concurrency {concurrency}" for concurrency, share in shares.items())
    baseline = f"{texts} texts of four lists behind {len(INSTRUCTIONS)} instructions; {each_share}"
    results.add("litellm_routed_to_holder_share", min(shares.values()), "share", baseline, 0.98, "higher")


main = partial(
    run_counted,
    {"fleet_gateway": run},
    __doc__,
    [Count("texts", 40, "texts that are asked about")],
    url={"default": "http://127.0.0.1:4000", "help": "the gateway (default: %(default)s)"},
    model={"default": "catalogue", "help": "what it calls the model (default: %(default)s)"},
)


if __name__ == "__main__":
    main()
