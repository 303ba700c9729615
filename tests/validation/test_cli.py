"""The command on a tiny model: a whole run, its files, and the exit status of every kind of bad usage."""

import json
import os
import re
import stat
import subprocess
import sys
from unittest.mock import Mock

import pytest

from validation import results
from validation.cli import main

ARMS = ("cold", "cold_again", "exact_prefix", "position_fix", "boundary")  # of a model without a reuse profile
# One token a byte: two documents of about 150 tokens each, in one order for the donor and in the other for the prompt.
FIRST = "Stock list of Depot Oslo.\n" + "\n".join(f"item number {i}: {i * 37 % 91}" for i in range(7))
SECOND = "Stock list of Barn Riga.\n" + "\n".join(f"thing number {i}: {i * 53 % 97}" for i in range(7))
LONG = "word " * 400
CASES = [
    {"id": "swap", "donors": [f"Read. {FIRST}{SECOND} Why?"], "prompt": f"Study this: {SECOND}{FIRST} How many?"},
    {"id": "known", "donors": [f"A {FIRST} Why?"], "prompt": f"Another {FIRST} How?", "reference": "17"},
]


def written(path, cases):
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


@pytest.fixture(scope="module")
def command(tiny_model_paths, tmp_path_factory):
    """A run of seconds whose speed is not judged: at this size, time says nothing."""
    prompts = written(tmp_path_factory.mktemp("prompts") / "cases.jsonl", CASES)
    return [
        *("--model", str(tiny_model_paths["qwen2"]), "--prompts", str(prompts), "--device", "cpu"),
        *("--max-tokens", "4", "--min-speedup", "0", "--min-rouge1", "0", "--min-token-f1", "0"),
    ]


@pytest.fixture
def run(command, tmp_path):
    def run(*arguments):
        report = tmp_path / "out" / "report.json"
        places = ["--output", str(report), "--audit-path", str(tmp_path / "audit.jsonl")]
        return main([*command, *places, *arguments]), json.loads(report.read_text())

    return run


def test_kv_in_fp8_is_told_against_the_engine_without_the_wrapper(run):
    status, report = run("--kv-dtype", "fp8", "--policy", "boundary", "--boundary", "3")
    assert (status, report["settings"]["kv_dtype"]) == (0, "fp8")
    (exactness,) = (gate for gate in report["gates"] if gate["name"] == "wrapper_exactness")
    assert "from embedded without the wrapper" in exactness["reads"]
    # The boundary is at the last layer.
    assert {sample["arm"] for sample in report["samples"] if sample["reused_tokens"]} == {"position_fix"}


@pytest.mark.promise("commands", "`make validate` exits with 0, 1 naming the failed gates, or 2 for bad usage")
def test_a_run_measures_every_case_in_every_arm(run, tmp_path, capsys):
    status, report = run("--record", str(tmp_path / "rows"), "--machine", "m", "--repeat", "2")
    assert (status, report["passed"]) == (0, True)
    assert {"num_samples", "mean_speedup", "mean_rouge1_f1", "mean_token_f1", "audit"} <= report.keys()
    samples = report["samples"]
    assert len(samples) == 2 * len(CASES) * len(ARMS)
    for sample in samples:
        assert sample["ttft_s"] > 0
        least = 250 - 130 * (sample["case_id"] == "known")
        assert (sample["reused_tokens"] > least) == (sample["arm"] in ("position_fix", "boundary"))
        parts = ("computed_tokens", "reused_tokens", "exact_prefix_tokens")
        assert sum(sample[part] for part in parts) == sample["prompt_tokens"]
        if sample["arm"].startswith("cold"):
            assert sample["computed_tokens"] == sample["prompt_tokens"]
            assert (sample["first_token_kl"], sample["token_agreement"], sample["perplexity_ratio"]) == (0.0, 1.0, 1.0)
        assert (sample["exact_match"] is None) == (sample["case_id"] == "swap")
    assert min(report["audit"]["materializations"], report["audit"]["rope_corrections"]) >= 2 * len(CASES)
    assert report["audit"]["donor_registrations"] >= 2
    events = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert {json.loads(line)["arm"] for line in events} == {"position_fix", "boundary"}
    [[row]] = results.read_rows(tmp_path / "rows").values()
    assert (row.name, row.holds) == ("wrapper_exactness_max_logit_diff", True)
    assert "unchecked" in capsys.readouterr().out


@pytest.mark.promise("commands", "`make validate` serves a part of...")
def test_a_run_is_one_screen_and_a_page_and_a_full_one_has_every_arm(run, tmp_path, capsys):
    status, report = run()
    screen = capsys.readouterr().out
    assert (status, {sample["arm"] for sample in report["samples"]}) == (0, set(ARMS) - {"boundary"})
    assert screen.startswith("a document that moved: ")
    assert "position_fix" not in screen
    assert len(screen.splitlines()) <= 24
    assert f"page: {tmp_path / 'out' / 'report.html'}\n" in screen
    assert max(map(len, screen.splitlines()[:-2])) <= 80
    html = (tmp_path / "out" / "report.html").read_text()
    assert '<mark class="reused">' in html
    assert "<h3>prompts: known</h3>" in html
    assert {sample["arm"] for sample in run("--full")[1]["samples"]} == set(ARMS)
    assert capsys.readouterr().out.startswith("a document that moved: ")


@pytest.mark.promise("commands", "`make validate` exits with 0, 1...")
def test_a_gate_that_fails_is_named_and_why_nothing_was_placed(run, capsys):
    status, report = run("--min-materializations", "99", "--policy", "boundary")
    assert (status, report["passed"]) == (1, False)
    sentence = r"gate failed: materializations is \d+, at least 99 is required \(audit log of arm boundary\)"
    assert re.search(sentence, capsys.readouterr().err)
    assert run("--min-match-length", "900")[0] == 1
    error = capsys.readouterr().err
    assert "gate failed: materializations is 0" in error
    assert "look-ups of the arm position_fix that placed nothing: " in error


@pytest.mark.promise("commands", "`make validate` exits with 0, 1...")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model /nowhere/at/all", "/nowhere/at/all"),
        ("--prompts missing.jsonl", "missing.jsonl cannot be read"),
        ("--min-rouge1 2", "--min-rouge1 is 2.0; the score lies between 0 and 1"),
        ("--max-tokens 0", "--max-tokens is 0; it must be at least 1"),
        ("--max-tokens 5000", "the model's context holds 1024"),
        (f"--seed {'9' * 30}", f"--seed is {'9' * 30}; it must be at most 4294967295"),
        ("--arms=", "Argument --arms: the name is empty"),
        (f"--output {'n' * 256}", "cannot be written (File name too long)"),
        ("--audit-path /dev/full", "/dev/full cannot be written (No space left on device)"),
        ("--no-such\x1b[2J\nflag", r"Unrecognized arguments: --no-such\x1b[2J\nflag"),
        ("--boundary 4", "--boundary is 4; the model has 3 layers"),
        ("--policy verified", "The arm verified needs a reuse profile of this model"),
        ("--policy cold_again", "--policy is cold_again, an arm that reuses no donor"),
        ("--arms boundary_4", "The arm boundary_4 asks for 4 layers; the model has 3"),
        ("--arms cacheblend_101", "asks for 101 % of the tokens; at most 100 are there"),
        ("--profile missing.json", "--profile missing.json is not a file"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--device tpu", "device tpu"),
        ("--min-speed 1", "Unrecognized arguments: --min-speed"),
        ("--output .", "is a folder"),
        ("--machine ../elsewhere", "--machine is '../elsewhere'"),
    ],
)
def test_bad_usage_is_one_sentence_and_leaves_nothing(command, arguments, sentence, check_refused):
    given = [arguments] if "=" in arguments or "\n" in arguments else arguments.split(" ")
    check_refused([*command, *given], sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("quality --groups 0", "--groups is 0; it must be at least 1"),
        ("quality --families reordered,lucky", "The family 'lucky' is unknown"),
        ("quality --families squad", "name their folder with --eval-data"),
        ("quality --tokens 100", "leave"),
        ("quality --tokens 9000", "the model's context holds 8192"),
        ("quality --form fancy", "invalid choice: 'fancy'"),
        ("replay", "The following arguments are required: --trace"),
        ("replay --trace missing.jsonl", "missing.jsonl cannot be read"),
        ("replay --trace t --policies mru", "--policies names 'mru'; there are fifo, lru, lfu"),
        ("replay --trace t --capacity-tokens 0", "--capacity-tokens holds 0"),
        ("replay --trace t --requests 0", "--requests is 0; it must be at least 1"),
        ("replay --trace t --requests 4294967296", "it must be at most"),
        ("calibrate --max-tries 0", "--max-tries is 0"),
        ("calibrate --risk 1", "--risk is 1; it must lie between 0 and 1"),
        ("calibrate --groups 76", "leaves 57 groups to show a bound; a risk of 0.05 needs 59, so 2 are missing"),
        ("calibrate --shares 0.1,0.2", "--shares is '0.1,0.2'; name 0 and"),
        ("calibrate --shares 0,1", "--shares is '0,1'; name 0 and"),
        ("calibrate --families unrelated", "has neither a harmless family nor a trap"),
        ("calibrate --engine trtllm --kv-dtype fp8", "is for --engine embedded and vllm, not for trtllm"),
    ],
)
def test_bad_usage_of_another_command_is_one_sentence_and_leaves_nothing(arguments, sentence, check_refused):
    check_refused(arguments.split(), sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps(CASES[0]) + "\n{\n", "cases.jsonl, line 2"),
        (json.dumps({"id": "a", "donors": ["abc"], "prompt": "abc"}), "The longest prompt has 3 tokens"),
        (json.dumps({"id": "long", "donors": ["a"], "prompt": LONG}), "Case long: the prompt has 2000 tokens"),
        (json.dumps({"id": "long", "donors": [LONG], "prompt": "a"}), "Case long: the donor 1 has 2000 tokens"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(command, tmp_path, capsys, text, sentence):
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    assert main([*command, "--prompts", str(path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert ("the model's context holds 1024" in error) == ("long" in text)


def test_quality_reports_each_family_of_the_users_own_cases(tiny_model_paths, tmp_path):
    """A case with a wrong answer of its donors makes its family a trap."""
    cases = [{**CASES[0], "family": "mine"}, {**CASES[1], "family": "misled", "donor_answer": "18"}]
    path, output = written(tmp_path / "own.jsonl", cases), tmp_path / "quality.json"
    model = ["--model", str(tiny_model_paths["qwen2"]), "--device", "cpu", "--max-tokens", "4"]
    main(["quality", *model, "--prompts", str(path), "--arms", "cold,position_fix", "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["kinds"] == {"mine": "harmless", "misled": "trap"}
    reused = {each["workload"]: each["reused_tokens"] for each in report["samples"] if each["arm"] == "position_fix"}
    assert min(reused["mine"], reused["misled"]) > 0


def test_names_of_cases_are_shown_and_do_nothing(command, tmp_path, capsys):
    """Rich's markup and a terminal's escapes alike."""
    path = written(tmp_path / "names.jsonl", [{**case, "id": f"[/] \x1b[2J {case['id']}"} for case in CASES])
    places = ["--output", str(tmp_path / "report.json"), "--audit-path", "/dev/null"]
    assert main([*command, *places, "--prompts", str(path)]) == 0
    captured = capsys.readouterr()
    assert "[2J" not in captured.err.replace(r"\x1b[2J", "")
    assert "\x1b[2J" not in captured.out
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_an_interrupt_ends_with_130(command, monkeypatch, capsys):
    for place in ("check_writable", "_exactness", "results.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(f"validation.cli.{place}", Mock(side_effect=KeyboardInterrupt))
            assert main(command) == 130
        assert "validation: interrupted\n" in capsys.readouterr().err


def test_idle_threads_do_not_spin_and_an_interrupt_while_it_is_imported_ends_with_130(tmp_path):
    shown = "import os, signal\nprint(os.environ['OMP_WAIT_POLICY'], flush=True)\n"
    (tmp_path / "torch.py").write_text(shown + "signal.raise_signal(signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("OMP_WAIT_POLICY", None)
    program = [sys.executable, "-m", "validation"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "passive\n", "validation: interrupted\n")
