"""Changed models are served as cold runs serve them, and a namespace that misses the change is found out."""

from __future__ import annotations

import json
import threading

from semblend_trt.donors.disk_tier import DiskTier
from tests.validation.benchmarks.dry_runs import dry_rows
from validation import embedded_engine
from validation.benchmarks import same_name
from validation.benchmarks.same_name import DOCUMENT_TOKENS, SameName, tried

TENSOR = "model.layers.0.self_attn.v_proj.bias"
FIELD = {"rms_norm_eps": 0.05}


def test_changed_models_meet_no_donor_and_the_same_one_under_another_name_does(tmp_path):
    found = tried(SameName(tmp_path), [TENSOR], [FIELD, {"hidden_size": 1}])
    assert (found.tensors, found.fields, found.refused) == (1, 1, ["hidden_size"])
    assert (found.wrong_tokens, found.reused_tokens, found.otherwise) == (0, 0, 2)
    assert found.control_tokens == 2 * DOCUMENT_TOKENS


def test_a_field_that_changes_no_kv_keeps_the_donors(tmp_path):
    found = tried(SameName(tmp_path), [], [{"use_cache": False}])
    assert (found.harmless, found.otherwise, found.wrong_tokens) == (1, 0, 0)


def test_weights_that_a_setting_calls_the_same_are_found_out(tmp_path):
    found = tried(SameName(tmp_path, MODEL_REVISION="mine"), [TENSOR], [])
    assert found.wrong_tokens > 0
    assert found.reused_tokens == 2 * DOCUMENT_TOKENS


def test_donors_get_their_files_on_a_disk_that_is_read_late(tmp_path, monkeypatch):
    asked, scan = threading.Event(), DiskTier.scan
    drain = embedded_engine.drain

    def late(disk):
        asked.wait(10)
        return scan(disk)

    def asking(llm):
        asked.set()
        drain(llm)

    monkeypatch.setattr(DiskTier, "scan", late)
    monkeypatch.setattr(embedded_engine, "drain", asking)
    assert SameName(tmp_path).reused_tokens == 2 * DOCUMENT_TOKENS


def test_every_tensor_and_field_has_its_turn(tmp_path):
    bench = SameName(tmp_path)
    tensors, fields = bench.tensors(), bench.fields()
    assert len(tensors) == 3 + 12 * same_name.LAYERS
    assert {"rms_norm_eps", "hidden_act", "rope_parameters", "architectures"} <= {
        name for each in fields for name in each
    }
    config = json.loads((tmp_path / "before" / "model" / "config.json").read_text())
    assert all(config[name] != value for each in fields for name, value in each.items())


def test_the_row_says_how_many_were_tried(tmp_path):
    row = dry_rows(same_name, tmp_path, "--most", "1")["same_name_other_weights_wrong_tokens"]
    assert row.value == 0
    assert "cold answers of 2 changed models: 1 by one tensor, 1 by one field" in row.baseline
