"""LoRA adapters: KV of one never serves another or the base model, and planned rows get their request's adapter."""

import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.cuda import is_available
from transformers import AutoConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.lora.request import LoRARequest

from benchmarks import bench_model
from engine_wrapper.vllm import adapters as vllm_adapters
from engine_wrapper.vllm import planned_forward
from engine_wrapper.vllm.adapters import LoadedAdapters
from engine_wrapper.vllm.hooks import set_adapters
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, WHOLE, is_cold, serving, while_another_decodes
from tests.engine_wrapper.watching import failing, watched
from validation.models import shipped_model

no_float32 = pytest.mark.skipif(is_available(), reason="skipped: vLLM's LoRA kernels for cards take no float32")
pytestmark = [pytest.mark.every_version, no_float32]

LORA = bench_model.OPTIONS[bench_model.LORA]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    config, folder = AutoConfig.from_pretrained(str(shipped_model())), tmp_path_factory.mktemp("adapters")
    return [bench_model.adapter_in(folder, config, number) for number in (1, 2)]


@pytest.fixture(scope="module")
def cold_with(adapters):
    """Answers to MOVED of vLLM without a connector: the base model's, and each adapter's."""
    served = serving(enable_prefix_caching=False, **LORA)
    try:
        found = [ask(served, (MOVED, each))[0] for each in (None, *adapters)]
    finally:
        served.close()
    assert len({tuple(answer.tokens) for answer in found}) == 3
    return found


def ask(served, *asked, max_tokens=8):
    """Answers to prompts with adapters, or None, that are asked together."""
    prompts, adapters = zip(*asked, strict=True)
    found = served.ask(*prompts, adapters=list(adapters), max_tokens=max_tokens)
    return found if isinstance(found, list) else [found]


def loaded(served, *adapters):
    """The engine with these adapters loaded, and the base model's self-check passed."""
    for prompt, each in ((NEW, None), *((NEW[:20], each) for each in adapters)):
        ask(served, (prompt, each), max_tokens=1)
    return served.emptied()


@pytest.mark.promise(
    "engines",
    "In vLLM a LoRA adapter reuses KV of its own weights alone, in mixed batches, replaced in place or under "
    "another's name",
)
@pytest.mark.parametrize("mode", [{"enforce_eager": False}, {}], ids=["compiled", "eager"])
def test_adapters_and_the_base_model_in_one_batch_reuse_each_their_own(engine, adapters, cold_with, mode, monkeypatch):
    served = loaded(engine(*WHOLE, kept=True, **LORA, **mode), *adapters)
    kinds = watched(monkeypatch, LoadedAdapters, "map_rows", lambda count, *_: count)
    for each in (None, *adapters):  # one after the other: a donor of another adapter must not be found
        assert ask(served.emptied(), (DONOR, each), max_tokens=1)[0].receipt["offered_tokens"] == 0
    # In a batch with adapters vLLM's kernels for a CPU give the base model's rows an adapter too.
    answers = ask(served.emptied(), (MOVED, None)) + ask(served, *((MOVED, each) for each in adapters))
    assert [is_cold(*each) for each in zip(answers, cold_with, strict=True)] == [True] * 3
    assert [each.receipt["offered_tokens"] for each in answers] == [len(DOCUMENT)] * 3
    ask(served.emptied(), *((MOVED, each) for each in (None, *adapters)), max_tokens=1)
    assert kinds == [0, 2, 3]


@pytest.mark.parametrize("is_failing", [False, True])
def test_another_request_keeps_its_adapter_beside_a_plan(engine, adapters, cold_with, monkeypatch, is_failing):
    served = loaded(engine(*WHOLE, **LORA), *adapters)
    [alone] = ask(served, (NEW, adapters[1]))
    ask(served.emptied(), (DONOR, adapters[0]), max_tokens=1)
    if is_failing:  # after a forward that has mapped its rows
        failing(monkeypatch, planned_forward, "_check_order", RuntimeError, once=False)
    found = while_another_decodes(served.emptied(), *reversed(adapters))
    assert found == {"new": alone.tokens, "moved": cold_with[1].tokens}
    assert served.runtime.faults.pop("planned_forward", 0) == is_failing


def test_a_step_that_decodes_after_a_plan_finds_its_mapping_set(engine, adapters, monkeypatch):
    served = loaded(engine(*WHOLE, **LORA), *adapters)
    ask(served.emptied(), (DONOR, adapters[0]), max_tokens=1)
    served.emptied()
    places = (LoRAModelManager, "_set_adapter_mapping"), (vllm_adapters, "set_adapters")
    made, ours = (watched(monkeypatch, *place, lambda _, __, to: len(to.index_mapping)) for place in places)
    ask(served, (MOVED, adapters[0]), max_tokens=3)
    assert (made, ours) == ([40, len(MOVED), 1], [len(MOVED), 1])


def kernels_of(device):
    """A manager, and what it gives to a card's kernels. Rows of a meta device cannot be read."""
    wrapper, ids = PunicaWrapperCPU(64, 16, device), [5, None, 7]
    found = wrapper.token_mapping_meta, wrapper.prompt_mapping_meta = [LoRAKernelMeta.make(3, 64, "cpu") for _ in "tp"]
    update = partial(PunicaWrapperGPU.update_metadata, wrapper)
    manager = {"set_adapter_mapping": lambda to: update(to, ids, 4, 1000), "lora_index_to_id": ids}
    return SimpleNamespace(**manager, punica_wrapper_mapping={"": wrapper}), found


def test_the_host_sorts_rows_as_a_card_does():
    (stock, wanted), (own, found) = kernels_of("cpu"), kernels_of("meta")
    drawn = np.random.default_rng(0).choice([0, 5, 7], (3, 50)).tolist()
    for ids in ([7] * 64, *drawn, drawn[0][:3], [0] * 9):
        stock.set_adapter_mapping(mapping := LoRAMapping(ids, ids, is_prefill=True))
        set_adapters(own, mapping)
        for pair in zip(wanted, found, strict=True):
            assert all(map(torch.equal, *(each.meta_args(len(ids), specialize_active_lora=True) for each in pair)))
    with pytest.raises(NotImplementedError):
        own.set_adapter_mapping(mapping)


@pytest.mark.promise("engines", "In vLLM a LoRA adapter reuses...")
def test_an_adapter_that_is_replaced_in_place_finds_nothing_of_the_one_before(engine, tmp_path, adapters, cold_with):
    """Its files change unseen first: vLLM goes on with what it has loaded, and so do its donors."""
    path = shutil.copytree(adapters[0].lora_path, tmp_path / "replaced")
    served = loaded(engine(*WHOLE, kept=True, **LORA), own := LoRARequest("own", 7, str(path)))
    ask(served, (DONOR, own), max_tokens=1)
    shutil.copytree(adapters[1].lora_path, path, dirs_exist_ok=True)
    [before] = ask(served.emptied(), (MOVED, own))
    assert is_cold(before, cold_with[1])
    assert before.receipt["offered_tokens"] > 0
    served.emptied().llm.llm_engine.add_lora(LoRARequest("own", 7, str(path), load_inplace=True))
    [after] = ask(served, (MOVED, own))
    assert is_cold(after, cold_with[2])
    assert after.receipt["reused_tokens"] == 0
    ask(served.emptied(), (DONOR, own), max_tokens=1)
    [again] = ask(served.emptied(), (MOVED, own))
    assert is_cold(again, cold_with[2])
    assert again.receipt["offered_tokens"] > 0


@pytest.mark.promise("engines", "In vLLM a LoRA adapter reuses...")
def test_an_adapter_under_the_name_of_another_finds_nothing_of_it(engine, tmp_path, adapters, cold_with):
    """It is unloaded, and another one loaded under its name: vLLM's own prefix cache goes by the name alone."""
    served = loaded(engine(*WHOLE, kept=True, **LORA), first := LoRARequest("name", 11, adapters[0].lora_path))
    ask(served, (DONOR, first), max_tokens=1)
    served.settle()  # vLLM's prefix cache keeps its blocks
    served.llm.llm_engine.remove_lora(11)
    second = LoRARequest("name", 12, adapters[1].lora_path)
    ask(served, (NEW[:20], second), max_tokens=1)
    assert ask(served, (MOVED, second), max_tokens=1)[0].receipt["offered_tokens"] == 0
    served.settle()
    donors = served.scheduler.donor_index.catalog.stats().ready
    [stale] = ask(served, ([*DONOR, *NEW], second), max_tokens=1)
    served.settle()
    if stale.receipt["exact_prefix_tokens"]:  # vLLM 0.32 tells the two apart
        assert served.scheduler.donor_index.catalog.stats().ready == donors
    served.forget()
    assert is_cold(*ask(served, (MOVED, second)), cold_with[2])
