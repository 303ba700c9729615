"""The recipe's attention sees what a KV cache in e4m3 holds, and a model trained so is served as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import validation
from benchmarks.yardstick_model import evaluate, kv_rounding, train
from benchmarks.yardstick_model.kv_rounding import ATTENTION_NAME, keep_kv, rounded
from benchmarks.yardstick_model.tokenizer import SEPARATOR
from engine_wrapper.embedded.llm import LLM, KvCacheConfig, SamplingParams
from kernels.layout import pool_view
from tests.conftest import save_tiny_model
from tests.engine_wrapper.serving import logits_of
from tests.kernels.builders import FP8, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

ASSETS = Path(validation.__file__).parent / "assets"
ROWS = "".join(f"<|doc|>Stock list of Depot Oslo {number}.\nlamps: 12\nbolts: 77" for number in range(6))
PROMPT = f"<|inst|>Go.{ROWS}<|q|>How many bolts are in Depot Oslo?<|a|>"
ANSWER = "77<|end|>lamps"
WINDOW = 48
SMALL = ["--layers", "4", "--hidden", "32", "--mlp", "48", "--heads", "2"]
# Relative, of logits in the 2-norm: sums of another order stay far below it, rounding to e4m3 far above.
TOLERANCE = 1e-3


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def engine(folder: Path, kv_dtype: str) -> LLM:
    cache = KvCacheConfig(dtype=kv_dtype, max_tokens=512)  # type: ignore[arg-type]
    return LLM(folder, dtype="float32", device="cpu", kv_cache_config=cache)


# -- rounding ---------------------------------------------------------------------------------------------------------


COMPILED = torch.compile(rounded, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("function", [rounded, COMPILED], ids=["plain", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_to_e4m3_and_saturate(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(4_096, generator=generator) * 10 ** torch.empty(4_096).uniform_(-4, 4, generator=generator)
    values = torch.cat([spread, torch.tensor([0.0, -0.0, 448.0, 460.0, -1e9, torch.inf, torch.nan])]).to(dtype)
    held = values.clamp(-448, 448).to(FP8).to(dtype)
    assert torch.equal(bits(function(values)), bits(held))
    assert torch.equal(bits(function(held)), bits(held))


@pytest.mark.parametrize("function", [rounded, COMPILED], ids=["plain", "compiled"])
def test_the_gradient_passes_as_if_nothing_were_rounded(function: Callable[..., torch.Tensor]) -> None:
    values = torch.tensor([0.017, -3.3, 447.0, 1_000.0], requires_grad=True)
    weights = torch.tensor([1.5, -2.0, 0.25, 3.0])
    (function(values) * weights).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, weights)


def test_attention_sees_what_the_engines_pool_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lowest layer, where K and V hang on nothing that was rounded before; some of both saturate."""
    model, tokenizer = evaluate.load(ASSETS / "model")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for parameter in (*attention.k_proj.parameters(), *attention.v_proj.parameters()):
            parameter.mul_(1_000.0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer(PROMPT).input_ids
    seen: list[torch.Tensor] = []
    attend = kv_rounding.sdpa_attention_forward

    def watch(module: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
        seen.append(torch.stack((key[0], value[0])))
        return attend(module, query, key, value, *others, **options)

    monkeypatch.setattr(kv_rounding, "sdpa_attention_forward", watch)
    keep_kv(model, "fp8")
    with torch.inference_mode():
        model(torch.tensor([ids]))
    assert len(seen) == model.config.num_hidden_layers
    with engine(tmp_path, "fp8") as llm:
        stream = llm.generate_async(ids, SamplingParams(max_tokens=2, ignore_eos=True))
        next(stream)
        blocks = llm.block_manager.block_ids(stream.request_id)
        pool = pool_view(llm.executor.pool.tensor, llm.executor.pool.geometry).view(torch.uint8)[blocks]
        stream.close()
    # Blocks of the lowest layer, [blocks, 2, kv_heads, block_size, head_dim], to [2, kv_heads, tokens, head_dim]
    held = pool[:, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : len(ids)]
    assert torch.equal(held, bits(seen[0].to(FP8)))
    assert torch.equal(seen[0].to(FP8).float(), seen[0])
    assert (seen[0].abs() == 448).any(dim=-1).any(dim=-1).all()


def test_a_model_without_sdpa_or_with_latent_rows_is_refused(tmp_path: Path) -> None:
    for family in ("gpt_oss", "deepseek_v3"):
        model = AutoModelForCausalLM.from_pretrained(save_tiny_model(family, tmp_path / family))
        with pytest.raises(ValueError, match="KV in fp8 is for SDPA to heads of K and V"):
            keep_kv(model, "fp8")
        keep_kv(model, "auto")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fresh", "window", "families"])
def trained(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Any, Any, Any]:
    """The folder of a model that two steps trained, that model, and model and tokenizer as they were evaluated."""
    options = list(SMALL)
    if request.param == "window":
        options += ["--window", str(WINDOW)]
    if request.param == "families":
        before = tmp_path / "before"
        tokenizer = Tokenizer.from_file(str(ASSETS / "model" / "tokenizer.json"))
        arguments = train.parse(["--text", "books.txt", "--out", "out", *SMALL])
        train.save(train.build_model(arguments, tokenizer.get_vocab_size()), tokenizer, before)
        options += ["--resume", str(before), "--families", "link"]
    found: list[Any] = []
    monkeypatch.setattr(train, "keep_kv", lambda *given: (keep_kv(*given), found.append(given[0])))
    for name in ("evaluate", "evaluate_families"):
        monkeypatch.setattr(evaluate, name, lambda *given: found.extend(given[:2]))
    text = tmp_path / "books.txt"
    prose = (ASSETS / "excerpt.txt").read_text(encoding="utf-8")
    text.write_text("It was a fine day. " * 6_000 + SEPARATOR + prose, encoding="utf-8")
    few = ["--steps", "2", "--batch-tokens", "8192", "--workers", "1", "--no-compile", "--device", "cpu"]
    train.main(["--text", str(text), "--out", str(tmp_path), "--kv-dtype", "fp8", *few, *options])
    return tmp_path / "model", *found


def test_a_model_trained_so_is_served_with_kv_in_fp8(trained: tuple[Path, Any, Any, Any]) -> None:
    folder, model, evaluated, tokenizer = trained
    for each in (model, evaluated):
        assert each.config._attn_implementation == ATTENTION_NAME
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert type(plain) is type(model)
    assert plain.config._attn_implementation == "sdpa"
    assert all(ATTENTION_NAME not in path.read_text(encoding="utf-8") for path in folder.glob("*.json"))

    ids, forced = tokenizer(PROMPT).input_ids, tokenizer(ANSWER).input_ids
    assert len(ids) > 2 * WINDOW
    with torch.inference_mode():
        cold = evaluated(torch.tensor([ids + forced])).logits[0, -len(forced) - 1 : -1]
        cache = evaluated(torch.tensor([ids[:-1]])).past_key_values
        cached = evaluated(torch.tensor([ids[-1:] + forced]), past_key_values=cache).logits[0, :-1]
    sampling = SamplingParams(
        max_tokens=len(forced), forced_token_ids=tuple(forced), return_generation_logits=True, ignore_eos=True
    )
    served = {}
    for kv_dtype in ("fp8", "auto"):
        with engine(folder, kv_dtype) as llm:
            served[kv_dtype] = logits_of(llm.generate([ids], sampling)[0])
    for found in (cold, cached):
        assert error_of(found, served["fp8"]) < TOLERANCE < error_of(found, served["auto"])
