"""Which version of the contract an engine keeps, and what that says of it."""

from inspect import signature
from types import SimpleNamespace

import pytest

from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker, contract, llm_args
from semblend_trt.connector.contract import V11
from semblend_trt.connector.llm_args import flashinfer_layout, version_of
from tests.semblend_trt.doctor.test_trtllm import RELEASES, module_of


@pytest.mark.promise(
    "engines",
    "The connector keeps to the contract of 1.2 and of 1.4: the same calls in the same order; 1.1 to 1.4 are known "
    "by their modules",
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_version_is_known_by_its_name_or_by_what_its_module_has(monkeypatch, release):
    assert version_of(release) == release
    monkeypatch.setattr("semblend_trt.connector.llm_args.upstream", module_of(release))
    assert version_of(None) == release


def test_what_is_not_known_is_taken_for_the_oldest():
    assert version_of("of another product") == version_of(None) == V11


@pytest.mark.parametrize(
    ("ours", "base"),
    [(SemBlendKvConnectorScheduler, contract._SchedulerBase), (SemBlendKvConnectorWorker, contract._WorkerBase)],
)
def test_our_methods_take_what_the_contract_hands_them(ours, base):
    for name in base.__abstractmethods__:
        assert list(signature(getattr(ours, name)).parameters) == list(signature(getattr(base, name)).parameters), name


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_layout_of_flashinfer_is_read_from_its_own_module(monkeypatch, layout):
    field = SimpleNamespace(default=layout)
    metadata = SimpleNamespace(__dataclass_fields__={"kv_layout": field})
    found = {llm_args._FLASHINFER_PATHS[1]: SimpleNamespace(FlashInferAttentionMetadata=metadata)}

    def import_module(path):
        if path not in found:
            raise ImportError(path)
        return found[path]

    monkeypatch.setattr(contract.importlib, "import_module", import_module)
    assert flashinfer_layout() == layout
    found.clear()
    assert flashinfer_layout() is None
