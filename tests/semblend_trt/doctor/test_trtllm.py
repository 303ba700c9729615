"""An installed TensorRT-LLM is known by what its module has, and an engine's options tell what keeps it from reuse."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import transformers

from semblend_trt.connector import contract
from semblend_trt.connector.contract import V11, flashinfer_layout, match_of, version_of
from semblend_trt.doctor.trtllm import MAX_BYTES, engine, options, read_options
from semblend_trt.errors import ConfigurationError
from semblend_trt.reasons import advice
from tests.pages import ROOT, Page
from tests.server_process import ended

COMMAND = "import sys; from semblend_trt.cli.main import main; sys.exit(main(['doctor', '--json']))"
(SOUND,) = Page("docs/attach.md").blocks("yaml")
WRAPPED = SOUND.replace("semblend_trt.connector", "engine_wrapper.connector")
V1 = "kv_cache_config: {use_kv_cache_manager_v2: false}\n"
MAX_UTILIZATION = "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}"
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9)).encode()
OLD = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"

# As in NVIDIA/TensorRT-LLM, `_torch/pyexecutor/kv_cache_connector.py` (1.1, 1.2) and
# `_torch/pyexecutor/connectors/kv_cache_connector.py` (1.3 release candidates, main).
FIELDS = ["request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens"]
SCHEDULER = ["build_connector_meta", "get_num_new_matched_tokens", "request_finished", "update_state_after_alloc"]
WORKER = ["register_kv_caches", "start_load_kv", "wait_for_layer_load", "save_kv_layer"]
WORKER += ["wait_for_save", "get_finished"]
GROUPS = ["update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"]
CALLABLE = "register_forward_pass_callable"
RELEASES = {
    "1.1": (OLD, FIELDS, [], []),
    "1.2": (OLD, FIELDS, [], [CALLABLE]),
    "1.3rc": (NEW, [*FIELDS, "priorities", "cache_salt_id"], ["wait_for_initialization"], [CALLABLE]),
    "1.4": (
        NEW,
        [*FIELDS, "block_hashes", "priorities", "cache_salt", "new_block_ids_by_layer_group"],
        ["wait_for_initialization", *GROUPS],
        [CALLABLE, "register_kv_cache_layout"],
    ),
}


def source_of(fields, scheduler, worker, abstract):
    """A module with TensorRT-LLM's RequestData and base classes; `abstract` are more methods that a scheduler needs."""
    lines = ["from abc import ABC, abstractmethod", "from dataclasses import dataclass"]
    lines += ["@dataclass", "class RequestData:"]
    lines += [f"    {name}: object = None" for name in fields]
    for kind, needed, optional in (
        ("KvCacheConnectorScheduler", [*SCHEDULER, *abstract], scheduler),
        ("KvCacheConnectorWorker", WORKER, ["bind_connector_meta", "get_connector_meta", *worker]),
    ):
        lines += [f"class {kind}(ABC):", "    def __init__(self, llm_args): self._llm_args = llm_args"]
        lines += [f"    @abstractmethod\n    def {name}(self, *arguments): ..." for name in needed]
        lines += [f"    def {name}(self, *arguments): ..." for name in optional]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("version", "serves"), [("4.53.1", False), ("4.57.6", False), ("5.0.0", True)])
def test_the_embedded_engine_is_promised_only_where_it_runs(monkeypatch, version, serves):
    monkeypatch.setattr(transformers, "__version__", version)
    (found,) = engine(None)
    assert (found.status == "note") is serves
    if not serves:
        assert found.status == "failed"
        assert f"TensorRT-LLM is not installed, and Transformers {version} is installed" in found.text


def doctor_beside(folder, release, abstract):
    """Status and findings of the doctor in a process that finds such a TensorRT-LLM."""
    path, fields, scheduler, worker = RELEASES[release]
    file = folder / (path.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True)
    file.write_text(source_of(fields, scheduler, worker, abstract))
    done = ended(sys.executable, "-c", COMMAND, cwd=folder, PYTHONPATH=f"{folder}:{ROOT}")
    assert done.stderr == ""
    found = json.loads(done.stdout)["findings"]
    return done.returncode, [finding for finding in found if finding["area"] == "engine"]


def test_an_installed_engine_gets_our_connector_where_it_can_make_it(tmp_path):
    status, (contract,) = doctor_beside(tmp_path / "1.2", "1.2", [])
    assert (status, contract["status"]) == (0, "ok")
    assert contract["text"] == f"TensorRT-LLM of unknown version keeps the connector contract '1.2' ({OLD})"
    status, (_, ours) = doctor_beside(tmp_path / "1.4", "1.4", ["rewind"])
    assert (status, ours["status"]) == (1, "failed")
    assert "which lacks SemBlendKvConnectorScheduler.rewind" in str(ours["text"])


@pytest.fixture
def look(tmp_path):
    """look(text): what is found in a file with this text."""

    def found(text):
        (tmp_path / "options.yaml").write_text(text)
        return list(options(read_options(tmp_path / "options.yaml")))

    return found


@pytest.mark.promise("engines", "Engines whose blocks cannot be trusted...")
@pytest.mark.parametrize(
    ("option", "status", "told"),
    [
        ("", "ok", "the connector is semblend_trt.connector"),
        ("pipeline_parallel_size: 2", "refused", "pipeline_parallel"),
        ("enable_attention_dp: true", "refused", "attention_dp"),
        ("speculative_config: {decoding_type: MTP}", "refused", "speculative_decoding"),
        ("attn_backend: FLASHINFER", "refused", "attention_backend"),
        ("kv_cache_config: {host_cache_size: 0, enable_block_reuse: false}", "failed", "never asks"),
        ("kv_cache_config: {enable_block_reuse: true}", "failed", "host_cache_size is None: the V2"),
        ("kv_cache_config: {use_kv_cache_manager_v2: auto}", "failed", "write host_cache_size: 0"),
        ("kv_cache_config: {use_kv_cache_manager_v2: true, host_cache_size: 9}", "failed", "size is 9"),
        ("kv_cache_config: {use_kv_cache_manager_v2: maybe}", "failed", "is 'maybe'; it is true, false or auto"),
        (f"{V1}{MAX_UTILIZATION}", "failed", "V1 lets no connector in with MAX_UTILIZATION"),
        (f"{V1}", "ok", "the connector is"),
        (MAX_UTILIZATION, "ok", "the connector is"),
        ("kv_connector_config: {}", "failed", "connector_module of kv_connector_config is None"),
        ("kv_connector_config: {connector_module: lmcache.connector}", "failed", "'lmcache.connector'"),
    ],
)
def test_an_option_that_keeps_the_connector_from_reuse(look, option, status, told):
    found = look(SOUND + option)[-1]
    assert found.status is status
    assert told in found.text if status != "refused" else (told, advice(told)) == (found.reason, found.text)


@pytest.mark.promise("engines", "Elsewhere it executes no plan, names...")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prefill_cuda_graph_backend: breakable", "prefill_graphs"),
        ("lora_config: {lora_dir: [a]}", "lora"),
        *((text, None) for text in ("", "cuda_graph_config: {enable_padding: true}", "cuda_graph_config: null")),
    ],
)
def test_what_keeps_the_wrapper_out_of_the_decoder_is_told(look, text, reason):
    connector, *notes = look(WRAPPED + text)
    assert connector.status == "ok"
    assert [(note.status, note.reason) for note in notes] == ([] if reason is None else [("note", reason)])
    assert len(look(SOUND + text)) == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"- a list", b"", b"a: [", b"a: \xff", b"a" * (MAX_BYTES + 1)),
        *(b"a: " + b"[" * 20_000 + b"]" * 20_000, b"a: " + b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
        *(b"a: &a [*a]", BOMB, b"a: 2001-99-99", b"a: !!bool maybe", b"a: !!timestamp never", b"? [a]\n: 1"),
    ],
)
def test_a_file_that_holds_no_options(tmp_path, content):
    (tmp_path / "options.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"options\.yaml"):
        read_options(tmp_path / "options.yaml")


@pytest.mark.promise("engines", "An installed TensorRT-LLM is matched to a version by what its module has")
@pytest.mark.promise(
    "engines",
    "The connector keeps to the contract of 1.2 and of 1.4: the same calls in the same order; 1.1 to 1.4 are known "
    "by their modules",
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_version_is_known_by_its_name_or_by_what_its_module_has(monkeypatch, release):
    assert (version_of(release), version_of("of another product"), version_of(None)) == (release, V11, V11)
    path, *parts = RELEASES[release]
    module = ModuleType(path)
    monkeypatch.setitem(sys.modules, path, module)  # dataclasses look their module up
    exec(source_of(*parts, []), module.__dict__)
    monkeypatch.setattr("semblend_trt.connector.contract.upstream", module)
    assert match_of(module) == version_of(None) == release


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_layout_of_flashinfer_is_read_from_its_own_module(monkeypatch, layout):
    field = SimpleNamespace(default=layout)
    metadata = SimpleNamespace(__dataclass_fields__={"kv_layout": field})
    for path in contract._FLASHINFER_PATHS:
        monkeypatch.setitem(sys.modules, path, None)
    assert flashinfer_layout() is None
    module = SimpleNamespace(FlashInferAttentionMetadata=metadata)
    monkeypatch.setitem(sys.modules, contract._FLASHINFER_PATHS[1], module)
    assert flashinfer_layout() == layout
