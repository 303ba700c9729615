"""Lookups of the SemBlend package, run by `semblend_package` with the interpreter of the package's own environment.

`python package_lookups.py FOLDER ARM`: reads FOLDER/case.npz (`donors` and `prompts` int32 [n, tokens], the numbers of
the documents that they hold in `donor_documents` and `prompt_documents`, negative for none, and `counts` of donors at
which to look up), writes FOLDER/ARM.json. Imports nothing of this repository.

Arm `embedding` has an embedder that costs nothing and knows which document a prompt holds, with and without the
package's fast path for equal tokens; arm `jaccard` is what the package does without an embedding model.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_SIZE = 32
FAST_PATH = "SEMBLEND_TRTLLM_TOKEN_PREFIX_FAST_PATH"


class KnowingEmbedder:
    """A unit vector for every text, the same for the same document."""

    dimension = 384
    available = True

    def embed(self, text: str) -> Any:
        vector = np.random.default_rng(list(text.encode())).standard_normal(self.dimension).astype(np.float32)
        return vector / np.linalg.norm(vector)


def main() -> None:
    folder, arm = Path(sys.argv[1]), sys.argv[2]
    case = np.load(folder / "case.npz")
    types = importlib.import_module("semblend.integration.trtllm.semantic_types")
    provider_module = importlib.import_module("semblend.integration.trtllm.semblend_provider")
    provider = provider_module.SemBlendTensorRTProvider(max_donors=10_000, embedder_type="jaccard")
    if arm == "embedding":
        provider._get_pipeline()._embedder = KnowingEmbedder()
    namespace = types.CacheNamespace(model="model", tokenizer="tokenizer", kv_layout="layout", block_size=BLOCK_SIZE)
    requests = [
        types.SemanticKvLookupRequest(number, tuple(tokens.tolist()), namespace, text_of(document))
        for number, (tokens, document) in enumerate(zip(case["prompts"], case["prompt_documents"], strict=True))
    ]
    counts, blocks = case["counts"].tolist(), case["donors"].shape[1] // BLOCK_SIZE
    registered: list[float] = []
    lookups: dict[str, dict[str, Any]] = {}
    for number, (tokens, document) in enumerate(zip(case["donors"], case["donor_documents"], strict=True)):
        began = time.perf_counter()
        provider.register_completed(
            request_id=f"donor-{number}", token_ids=tokens.tolist(), prompt_text=text_of(document),
            namespace=namespace, block_ids=[number * blocks + block for block in range(blocks)],
        )  # fmt: skip
        registered.append(time.perf_counter() - began)
        if number + 1 in counts:
            lookups[f"{arm} {number + 1}"] = look_up(provider, requests)
            if arm == "embedding":
                os.environ[FAST_PATH] = "1"
                lookups[f"token_prefix {number + 1}"] = look_up(provider, requests)
                os.environ[FAST_PATH] = "0"
    result = {"version": version("semblend"), "registered": registered[-50:], "lookups": lookups}
    (folder / f"{arm}.json").write_text(json.dumps(result), encoding="utf-8")


def text_of(document: int) -> str:
    return f"document {document}"


def look_up(provider: Any, requests: list[Any]) -> dict[str, Any]:
    """The seconds of every look-up (after an uncounted first one), whether it found a donor, and the prefix that it
    promises."""
    provider.lookup(requests[0])
    times, found, prefixes, reasons = [], [], [], []
    for request in requests:
        began = time.perf_counter()
        result = provider.lookup(request)
        times.append(time.perf_counter() - began)
        found.append(bool(result.found))
        reasons.append(result.rejection_reason)
        prefixes.append(int(result.plan.prefix_token_count) if result.found else 0)
    return {"times": times, "found": found, "prefixes": prefixes, "reasons": reasons}


if __name__ == "__main__":
    main()
