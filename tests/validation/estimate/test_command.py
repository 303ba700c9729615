"""The command: its table and file, what it refuses, and that no prompt's text leaves it."""

import json
import os

import numpy as np
import pytest

from benchmarks.evidence.models import published
from kernels.layout import KvGeometry
from semblend_trt.cli.main import main
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.semblend_trt.discovery.planning import profile
from tests.semblend_trt.held_donors import at_once
from tests.semblend_trt.test_reuse_profile import evidence

pytestmark = pytest.mark.usefixtures("installed_subcommands")
WORDS = ["amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "kayak", "mango"]
WORDS += ["ocean", "pearl", "quilt", "raven", "stone", "tulip", "umber", "vivid", "wheat", "xenon", "yacht", "zebra"]


@pytest.fixture
def log(tmp_path):
    """Twenty chats with two documents each, of four, and a question; two lines hold none."""
    random = np.random.default_rng(3)
    documents = [" ".join(random.choice(WORDS, 120)) for _ in range(4)]
    lines = []
    for _ in range(20):
        chosen = [documents[each] for each in random.choice(4, 2, replace=False)]
        asked = "\n\n".join([*chosen, " ".join(random.choice(WORDS, 12))])
        lines.append(json.dumps({"model": "m", "messages": [{"role": "user", "content": asked}]}))
    lines[4:4] = ['{"model": "m", "mess', '{"prompt": ""}']
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return path


def estimated(log, *arguments):
    path = log.with_name("figures.json")
    # The default pool has millions of blocks where a token takes few bytes.
    assert main(["estimate", str(log), "--json", str(path), "--pool-bytes", str(1 << 30), *arguments]) == 0
    return json.loads(path.read_text())


def test_a_log_leaves_a_table_and_a_file(log, capsys):
    found = estimated(log)
    shares = found["shares"]
    assert found["prompts"] == 20
    assert found["skipped"] == {"not JSON": {"count": 1, "first_line": 5}, "empty": {"count": 1, "first_line": 6}}
    assert shares["together"] == pytest.approx(shares["prefix_cache"] + shares["added"])
    assert shares["added"] > 0.1
    times = found["expected_ttft"]
    assert times["with_donors"]["mean_ms"] < times["with_checked_donors"]["mean_ms"] < times["prefix_cache"]["mean_ms"]
    assert times["prefix_cache"]["mean_ms"] < times["cold"]["mean_ms"]
    shown = capsys.readouterr()
    assert "20 prompts" in shown.out
    assert f"{shares['together']:.1%}" in shown.out
    assert "Passed over: 1 not JSON (first in line 5), 1 empty (first in line 6)." in shown.out
    assert "fitted to 10 observations of vLLM 0.25.1 on an H100" in shown.out
    assert "without --tokenizer" in shown.err


@pytest.mark.promise(
    "commands", "`semblend-trt estimate` ends with status 2 where it passed over more lines than it read prompts"
)
@pytest.mark.parametrize(("bad", "status"), [(20, 0), (21, 2)])
def test_more_lines_passed_over_than_read_end_with_status_2(log, capsys, bad, status):
    with log.open("a") as file:
        file.writelines(['\n{"prompt": ""}'] * (bad - 2))
    assert main(["estimate", str(log)]) == status
    shown = capsys.readouterr()
    assert "20 prompts of" in shown.out
    assert ("21 lines were passed over and 20 prompts read" in shown.err) == (status == 2)


@pytest.mark.promise(
    "commands",
    "`semblend-trt estimate` shows and writes no text of a prompt; lines that it cannot read are counted and cost "
    "no other line",
)
def test_no_word_of_a_prompt_is_shown_or_written(log, capsys):
    estimated(log)
    shown = capsys.readouterr()
    written = shown.out + shown.err + log.with_name("figures.json").read_text()
    assert [word for word in WORDS if word in written] == []


def test_less_memory_holds_less(log):
    much, little = estimated(log), estimated(log, "--kv-bytes-a-token", "1000", "--host-bytes", "1500000")
    assert (much["memory"]["evicted_donors"], much["memory"]["kv_bytes_a_token"]) == (0, 57344)
    assert little["memory"]["host_tokens"] == 1500
    assert little["memory"]["evicted_donors"] > 0
    assert 0 < little["shares"]["added"] < much["shares"]["added"]
    assert estimated(log, "--min-span", "5000")["shares"]["added"] == 0


def test_that_donors_cost_a_growing_conversation_its_prefix_is_said(tmp_path, capsys):
    """The document moves once; after that each prompt goes on from the one before."""
    random = np.random.default_rng(5)
    document, turns = " ".join(random.choice(WORDS, 150)), [" ".join(random.choice(WORDS, 8)) for _ in range(12)]
    prompts = [f"one {document}", *(f"two {document}" + "".join(turns[:end]) for end in range(12))]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    assert estimated(path, "--min-span", "32")["shares"]["added"] < 0
    assert "Donors cost more than they add here" in capsys.readouterr().out


def test_a_model_and_a_profile_say_how_large_the_kv_is(log, tiny_qwen2_path, tmp_path):
    assert estimated(log, "--model", str(tiny_qwen2_path))["memory"]["kv_bytes_a_token"] == 3 * 2 * 2 * 16 * 4
    (latent,) = (each for each in published() if each.name == "deepseek-ai/DeepSeek-V3")
    (folder := tmp_path / "latent").mkdir()
    latent.save(folder)
    assert estimated(log, "--model", str(folder))["memory"]["kv_bytes_a_token"] == 61 * 576 * 2
    path = tmp_path / "profile.json"
    figures = evidence("verified layer 1 threshold 0.1")
    profile("verified", check=ProfileCheck(layer=1, threshold=0.1), figures=figures).write(path)
    sizes = ReuseProfile.read(path).geometry
    expected = KvGeometry(sizes.num_layers, sizes.kv_heads, sizes.head_dim, 32)
    found = estimated(log, "--profile", str(path))
    assert found["memory"]["kv_bytes_a_token"] == 2 * expected.num_layers * expected.kv_heads * expected.head_dim * 2
    assert found["shares"]["added"] > 0.1


@pytest.mark.parametrize("policy", ["verified", "exact", "off", "epic", "position_fix"])
def test_what_is_set_is_shown_beside_any_run(policy, log, monkeypatch, capsys):
    """A profile of the environment counts, and one without evidence is refused as in service."""
    monkeypatch.setenv("SEMBLEND_POLICY", policy)
    found = estimated(log)
    assert found["terms"] == "any run, without a profile"
    if policy == "position_fix":
        assert "compared" not in found
        return
    compared = found["compared"]
    assert compared["terms"].startswith(f"as set: policy {policy}")
    assert compared["shares"]["prefix_cache"] == found["shares"]["prefix_cache"]
    assert (compared["shares"]["added"] > 0.1) is (policy == "epic")
    assert (compared["prompts_without_donors"] == {"policy_off": 20}) is (policy == "off")
    assert compared["terms"] in capsys.readouterr().out


def test_a_profile_is_shown_beside_any_run_and_one_without_evidence_allows_exact_runs(log, monkeypatch, tmp_path):
    path, check = tmp_path / "profile.json", ProfileCheck(layer=1, threshold=0.1)
    shown = []
    for figures in (evidence("verified layer 1 threshold 0.1"), []):
        profile("verified", check=check, figures=figures).write(path)
        monkeypatch.setenv("SEMBLEND_PROFILE", str(path))
        shown.append(estimated(log)["compared"])
        assert estimated(log, "--kv-bytes-a-token", "100")["compared"]["shares"] == shown[-1]["shares"]
    proven, unproven = shown
    assert "refused" in unproven["terms"]
    assert unproven["shares"]["added"] == 0 < 0.1 < proven["shares"]["added"]
    monkeypatch.delenv("SEMBLEND_PROFILE")
    assert main(["estimate", str(log), "--profile", str(path)]) == 2
    profile("verified", check=check, figures=evidence("verified layer 1 threshold 0.1")).write(path)
    named = estimated(log, "--profile", str(path))
    assert named["shares"] == proven["shares"]
    assert named["compared"]["terms"] == "any run, without a profile"


def test_times_of_ones_own_are_taken(log, tmp_path):
    own = tmp_path / "ttft.json"
    seen = [{"ttft_ms": 5.0 + n, "computed": n, "reused": 0} for n in (10, 50, 100, 500, 1000, 5000)]
    own.write_text(json.dumps(seen))
    times = estimated(log, "--ttft", str(own), "--limit", "3")["expected_ttft"]
    assert times["model"]["computed_ms"] == pytest.approx(1.0)
    assert times["extrapolated_share"] == pytest.approx(2 / 3)  # none of them tells of reused tokens
    assert "with_checked_donors" not in times


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "log.jsonl holds no prompt; give a log of requests, one a line"),
        (b'{"messages": [\n', "One request"),
        (b'[\n {"messages": []},\n {"messages": []}\n]\n', "not JSON (first in line 1)"),
        (bytes(range(256)) * 50, "not text in UTF-8 (first in line 1)"),
    ],
    ids=["empty", "cut", "not a line each", "binary"],
)
def test_a_file_without_a_prompt_ends_with_two_and_one_sentence(content, sentence, tmp_path, capsys):
    (tmp_path / "log.jsonl").write_bytes(content)
    assert main(["estimate", str(tmp_path / "log.jsonl"), "--json", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence.lower() in captured.err.splitlines()[-1].lower()
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read (No such file or directory)"),
        (["."], ". cannot be read (Is a directory)"),
        (["pipe"], "(it is not a regular file; a pipe can be given as /dev/stdin); name a file of prompts"),
        (["log", "--tokenizer", "nowhere/at all"], "tokenizer nowhere/at all cannot be read"),
        (["log", "--model", "nowhere/at all"], "give --kv-bytes-a-token in place of --model"),
        (["log", "--profile", "missing.json"], "missing.json"),
        (["log", "--pool-bytes", "1000"], "--pool-bytes is 1000, less than a block of 32 tokens"),
        (["log", "--min-span", "9999999"], "min_span_tokens is '9999999'"),
        (["log", "--json", "."], ". is a folder"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text("Why?\n")
    os.mkfifo("pipe")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert at_once(lambda: main(["estimate", *arguments])) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("semblend-trt: ")
    assert sentence in last
