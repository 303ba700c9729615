"""README and documents name what exists: files, headings, settings, commands, classes; reasons and known defects."""

import ast
import re

import pytest
import yaml

import engine_wrapper.connector
import semblend_trt.connector
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from semblend_trt import audit
from semblend_trt.cli.main import subcommands
from semblend_trt.config import Settings, variables_of
from semblend_trt.donors.disk_tier import FILE_REASONS
from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.fleet.placement import RESULTS
from semblend_trt.fleet.publisher import DROP_REASONS, RESYNC_REASONS
from semblend_trt.reasons import FAULTS, OTHER_REASON, REASONS
from tests.pages import PAGES, README, ROOT, Page, code_in, marks
from tests.reasons import filled

CONNECTORS = {module.__name__: module for module in (semblend_trt.connector, engine_wrapper.connector)}
EVERY_PAGE = pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)


@pytest.mark.promise("commands", "Links, files, settings, commands and the quick start of README and docs are true")
@EVERY_PAGE
def test_links_lead_to_files_and_headings(page):
    for file, _, heading in (link.partition("#") for link in page.links if "://" not in link):
        target = (ROOT / page.name).parent / file if file else ROOT / page.name
        assert target.exists()
        assert not heading or heading in anchors(target.read_text()), f"{file}#{heading}"


def anchors(text):
    """The fragments by which a page's headings are linked to, as GitHub makes them."""
    titles = (line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#"))
    named = re.findall(r'<a id="([^"]+)">', text)
    return {*named, *(re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles)}


@EVERY_PAGE
def test_settings_exist(page):
    known = {variable for name in Settings.model_fields for variable in variables_of(name)}
    named = {*re.findall(r"(?:TRTLLM_)?SEMBLEND_\w+", page.code)}
    assert named - {"SEMBLEND_X", "TRTLLM_SEMBLEND_X"} <= known


@pytest.mark.promise("commands", "Links, files, settings, commands and the...")
@EVERY_PAGE
@pytest.mark.usefixtures("installed_subcommands")
def test_commands_exist(page):
    assert {*re.findall(r"\bsemblend-trt ([a-z][a-z-]*)", page.code)} <= set(subcommands())
    targets = re.search(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1].split()
    assert {*re.findall(r"^make ([a-z][a-z-]*)", page.code, re.MULTILINE)} <= {*targets}


@EVERY_PAGE
def test_python_files_exist(page):
    named = {span for span in page.spans if span.endswith(".py") and not set(span) & set(" <>*")}
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_examples_for_tensorrt_llm_use_classes_and_arguments_that_there_are():
    """The embedded engine has the names of its arguments from there."""
    attach = Page("docs/attach.md")
    tree, options = ast.parse(attach.blocks("python")[0]), yaml.safe_load(attach.blocks("yaml")[0])
    calls = {ast.unparse(node.func): node.keywords for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {name: {each.arg: each.value for each in keywords} for name, keywords in calls.items()}
    assert {*given["LLM"], *options} <= set(LlmArgs.model_fields)
    known = {*KvCacheConfig.model_fields, "free_gpu_memory_fraction"}
    assert {*given["KvCacheConfig"], *options["kv_cache_config"]} <= known
    fields = {name: ast.literal_eval(value) for name, value in given["KvCacheConnectorConfig"].items()}
    for each in (fields, options["kv_connector_config"]):
        config = KvCacheConnectorConfig(**each)
        module = CONNECTORS[config.connector_module]
        assert hasattr(module, config.connector_scheduler_class)
        assert hasattr(module, config.connector_worker_class)
    assert set(CONNECTORS) <= {*attach.spans, options["kv_connector_config"]["connector_module"]}


REASON_PAGES = [Page("docs/failure-modes.md"), Page("docs/vllm.md"), Page("docs/sglang.md")]
# They name every reason for which the code refuses or drops, in the last columns of their tables, and no other.
TOLD = {name for page in REASON_PAGES for row in page.rows for name in code_in(row[-1]) if name.isidentifier()}
FAILED_MOVES = {"write_failed", "write_skipped", "fetch_failed", "lift_failed", "file_refused", "disk_unavailable"}
# How a prompt may be placed without its text.
PLACED = {*RESULTS} - {"held"}
# Of a connection to NATS, and of a worker that a reader does not follow.
OTHER_COUNTS = {"failed", "dropped", "refused", "id_twice"}


@pytest.mark.promise("commands", "Every reason and fault is in `docs/failure-modes.md` or `docs/vllm.md`")
def test_the_pages_have_every_reason_and_no_other():
    """What is listed here needs a row that counts as it, or an entry in the table of reasons."""
    assert {*OffloadEventKind} > FAILED_MOVES
    events = {*DROP_REASONS, *RESYNC_REASONS, *audit.DROP_REASONS, *FAILED_MOVES}
    assert TOLD ^ {*REASONS, *FAULTS, *FILE_REASONS, *events, *PLACED, *OTHER_COUNTS} == set()
    assert f"`{OTHER_REASON}`" in REASON_PAGES[0].text


@pytest.mark.parametrize("page", REASON_PAGES, ids=lambda page: page.name)
def test_tables_of_reasons_are_made_from_the_code(page):
    """`python -m tests.reasons` writes them."""
    assert page.text == filled(page.text)


def test_every_defect_is_on_the_page_and_has_its_tests():
    cells = [row[0] for row in REASON_PAGES[0].rows if re.fullmatch(r"\d+(, \d+)*", row[0])]
    assert sorted(int(number) for cell in cells for number in cell.split(", ")) == [*range(1, 38)]
    assert {number for _, *numbers in marks("known_defect") for number in numbers} == {*range(1, 38)}
