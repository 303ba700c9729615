"""Which version of the contract an engine keeps, and what that says of it."""

from types import SimpleNamespace

import pytest

from semblend_trt.connector import contract
from semblend_trt.connector.contract import V11, flashinfer_layout, version_of
from tests.semblend_trt.doctor.test_trtllm import RELEASES, module_of


@pytest.mark.promise(
    "engines",
    "The connector keeps to the contract of 1.2 and of 1.4: the same calls in the same order; 1.1 to 1.4 are known "
    "by their modules",
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_version_is_known_by_its_name_or_by_what_its_module_has(monkeypatch, release):
    assert (version_of(release), version_of("of another product"), version_of(None)) == (release, V11, V11)
    monkeypatch.setattr("semblend_trt.connector.contract.upstream", module_of(release))
    assert version_of(None) == release


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_layout_of_flashinfer_is_read_from_its_own_module(monkeypatch, layout):
    field = SimpleNamespace(default=layout)
    metadata = SimpleNamespace(__dataclass_fields__={"kv_layout": field})
    found = {contract._FLASHINFER_PATHS[1]: SimpleNamespace(FlashInferAttentionMetadata=metadata)}

    def import_module(path):
        if path not in found:
            raise ImportError(path)
        return found[path]

    monkeypatch.setattr(contract.importlib, "import_module", import_module)
    assert flashinfer_layout() == layout
    found.clear()
    assert flashinfer_layout() is None
