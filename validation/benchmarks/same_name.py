"""A changed model under an old name: the old model's KV serves no request.

`python -m validation.benchmarks.same_name` serves a small model of Qwen2's architecture with a disk tier and a profile
that allows every donor. Then one tensor or one field of config.json is changed at a time, in a folder of the same name,
with that disk tier and that profile. Counted are tokens that a cold run of the changed model does not give.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.sampling import SamplingParams
from kernels.results import Count, Results, run_counted
from semblend_trt.connector.model_facts import HARMLESS_FIELDS
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.reuse_profile import ReuseProfile
from validation.embedded_engine import evict_prefixes, find_donors, open_cold, open_llm
from validation.models import shipped_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM


LAYERS, DOCUMENT_TOKENS, POOL_TOKENS = 2, 96, 1024
# More than the model has.
ALL = 1_000
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)
# Other values for fields of which `_other` makes none that a loader takes.
_OTHERS = {
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_act": "gelu",
    "num_hidden_layers": LAYERS - 1,
    "rms_norm_eps": 0.05,
    "sliding_window": DOCUMENT_TOKENS,
}


@dataclass(slots=True)
class Found:
    """Changed models by what was changed, `tensors` and `fields`. `refused`: fields that no loader takes; `harmless`:
    changes that may keep their donors; `otherwise`: changes with other cold answers. `control_tokens`: what the
    unchanged model reuses."""

    tensors: int = 0
    fields: int = 0
    refused: list[str] = field(default_factory=list)
    harmless: int = 0
    otherwise: int = 0
    wrong_tokens: int = 0
    reused_tokens: int = 0
    control_tokens: int = 0


class SameName:
    """A model with its donors and its profile, and its answers cold and with the donors, in `folder`.

    `variables`, without SEMBLEND_, are set for every engine.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder, self._variables = folder, variables
        self._before = _make(folder / "before" / "model")
        rng = random.Random(0)
        document = [rng.randrange(8, 512) for _ in range(DOCUMENT_TOKENS)]
        self._donor = [*document, 1]
        # The first prompt has the donor fetched; the others hold its text shifted, and from position 0 on.
        self._asked = [[*document, 2, 3], [4, 5, 6, *document, 2, 3], [*document, 7]]
        runner = ModelRunner(self._before, device="cpu")
        with self._engine(runner, self._before, folder / "donors", MIN_DONOR_TOKENS="64") as llm:
            find_donors(llm)
            llm.generate([self._donor], _ANSWER)
            llm.settle()
            scheduler, pool = llm.connector_scheduler, llm.connector_worker._runtime.pool
            profile = ReuseProfile.made_for(scheduler.namespace, pool.geometry, policy="position_fix")
            profile.write(folder / "profile.json")
        self.cold_answers = self._cold(runner, self._before)
        # A control: the same files under another name find the donors.
        renamed = Path(shutil.copytree(self._before, folder / "renamed"))
        self.donor_answers, self.reused_tokens = self._served(ModelRunner(renamed, device="cpu"), renamed)

    def changed(self, tensor: str | None = None, **fields: Any) -> tuple[list[list[int]], list[list[int]], int]:
        """Cold answers of the changed model, its answers beside the old donors, and the tokens reused.

        Raises ConfigurationError and UnsupportedModelError for what no loader takes.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            folder = Path(shutil.copytree(self._before, Path(place) / self._before.name))
            if tensor is not None:
                weights = load_file(folder / WEIGHTS)
                held = weights[tensor]
                noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(0))
                weights[tensor] = held + 0.5 * max(0.2, float(held.std())) * noise.to(held.dtype)
                save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            if fields:
                config = json.loads((folder / CONFIG).read_text())
                (folder / CONFIG).write_text(json.dumps({**config, **fields}))
            runner = ModelRunner(folder, device="cpu")
            served, reused = self._served(runner, folder)
            return self._cold(runner, folder), served, reused

    def tensors(self) -> list[str]:
        return sorted(load_file(self._before / WEIGHTS))

    def fields(self) -> list[dict[str, Any]]:
        """Another value for each field of config.json, nested fields included."""
        config = json.loads((self._before / CONFIG).read_text())
        found: list[dict[str, Any]] = []
        for name, value in config.items():
            nested = value if isinstance(value, dict) else {}
            found += [{name: {**nested, inner: _other(inner, nested[inner])}} for inner in nested]
            if not nested:
                found.append({name: _other(name, value)})
        return found

    def _cold(self, runner: ModelRunner, model: Path) -> list[list[int]]:
        with open_cold(model, runner, POOL_TOKENS) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(self._asked, _ANSWER)]

    def _served(self, runner: ModelRunner, model: Path) -> tuple[list[list[int]], int]:
        """Answers beside a copy of the donors, and tokens reused."""
        answers, reused = [], 0
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            donors = shutil.copytree(self._folder / "donors", Path(place) / "donors")
            profile = {"PROFILE": str(self._folder / "profile.json"), "PROFILE_TRIAL": "1"}
            more = {**profile, "MIN_DONOR_TOKENS": str(POOL_TOKENS)}
            with self._engine(runner, model, Path(donors), **more) as llm:
                for prompt in self._asked:
                    find_donors(llm)
                    evict_prefixes(llm)
                    (output,) = llm.generate([prompt], _ANSWER)
                    answers.append(list(output.outputs[0].token_ids))
                    reused += output.reused_tokens
        return answers, reused

    def _engine(self, runner: ModelRunner, model: Path, donors: Path, **variables: str) -> LLM:
        settings = {
            "HOST_BYTES": str(64 << 20),
            "DISK_BYTES": str(64 << 20),
            "DISK_PATH": str(donors),
            "MIN_SPAN": "32",
            "MIN_REUSE_RATIO": "0.1",
            "EMBEDDER": "off",
            "LOOKUP_DEADLINE_MS": "5000",
            **self._variables,
            **variables,
        }
        return open_llm(model, runner.share(), settings, pool_tokens=POOL_TOKENS, max_seq_len=POOL_TOKENS)


def _make(folder: Path) -> Path:
    """Writes a random model with such wide weights that every tensor shows in the answers."""
    config = Qwen2Config(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=POOL_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped_model() / name, folder)
    return folder


def _other(name: str, value: Any) -> Any:
    if name in _OTHERS:
        return _OTHERS[name]
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value * 2 if value else 1
    return value[:-1] if isinstance(value, list) else f"{value}x"


def tried(bench: SameName, tensors: Sequence[str], fields: Sequence[dict[str, Any]]) -> Found:
    """Tries each change alone. Where a field changes no KV, donors may be reused, and answers with them are right."""
    found = Found(control_tokens=bench.reused_tokens)
    changes: list[tuple[str | None, dict[str, Any]]] = [(name, {}) for name in tensors]
    changes += [(None, change) for change in fields]
    for tensor, change in changes:
        try:
            cold, served, reused = bench.changed(tensor, **change)
        except (ConfigurationError, UnsupportedModelError):
            found.refused += list(change)
            continue
        found.tensors += tensor is not None
        found.fields += tensor is None
        found.otherwise += cold != bench.cold_answers
        keeps_donors = HARMLESS_FIELDS.issuperset(change) and tensor is None and cold == bench.cold_answers
        pairs = zip(chain(*(bench.donor_answers if keeps_donors else cold)), chain(*served), strict=True)
        found.harmless += keeps_donors
        found.reused_tokens += 0 if keeps_donors else reused
        found.wrong_tokens += sum(right != given for right, given in pairs)
    return found


def run(most: int, rows: Results) -> None:
    """Tries every change, or the first `most` tensors and fields."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="same-name-") as folder:
        bench = SameName(Path(folder))
        found = tried(bench, bench.tensors()[:most], bench.fields()[:most])
    variants = found.tensors + found.fields
    baseline = (
        f"cold answers of {variants} changed models: {found.tensors} by one tensor, {found.fields} by one field of "
        f"config.json ({found.harmless} of them change no KV); {len(found.refused)} more fields are refused; "
        f"{found.otherwise} answer otherwise than before and reuse {found.reused_tokens} tokens; the same model under "
        f"another name reuses {found.control_tokens}"
    )
    rows.add("same_name_other_weights_wrong_tokens", found.wrong_tokens, "tokens", baseline, 0)


main = partial(run_counted, "same_name", __doc__, [Count("most", ALL, "tensors, and as many fields")], run)


if __name__ == "__main__":
    main()
