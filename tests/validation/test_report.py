"""Each gate reads the arm and the workloads that it names; the report holds every sample, its tables and its rows."""

import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser

import pytest

from semblend_trt.errors import ConfigurationError
from tests.random_models import byte_tokenizer
from validation.cases import Case, Expectation
from validation.exactness import Exactness
from validation.report import BOUNDS, Gate, Report, check_bounds, end_to_end_rows, gates_of, marked, page, summaries

BUSY = dict.fromkeys([*BOUNDS][3:], 8)


def gate(name, samples, audit=BUSY, exactness=None):
    bounds = {name: default for name, (default, _) in BOUNDS.items()}
    [found] = [g for g in gates_of(samples, audit, "position_fix", bounds, exactness) if g.name == name]
    return found


@pytest.mark.parametrize(
    ("value", "bound", "better", "holds"),
    [
        *[(1.05, 1.05, "higher", True), (1.0499, 1.05, "higher", False), (None, 1.0, "higher", True)],
        *[(0.02, 0.02, "lower", True), (0.0201, 0.02, "lower", False), (math.nan, 0.02, "lower", False)],
    ],
)
def test_a_gate_includes_its_bound(value, bound, better, holds):
    assert Gate("g", value, bound, better, "").holds is holds
    sentence = Gate("speedup", 0.9, 1.05, "higher", "what it reads").sentence()
    assert sentence == "speedup is 0.9, at least 1.05 is required (what it reads)"


def test_speedup_is_the_median_of_timed_prompts_and_closeness_a_mean_over_the_named_arm(make_sample):
    samples = [make_sample(case_id=str(i), speedup=value) for i, value in enumerate((1.0, 5.0, 2.0))]
    samples += [make_sample(case_id="question", timed=False, speedup=None)]
    samples += [make_sample(case_id="unrelated", expects="none", speedup=0.1)]
    samples += [make_sample(case_id=str(i), arm="boundary", speedup=0.1) for i in range(3)]
    assert gate("speedup", samples).value == 2.0
    samples = [make_sample(rouge1_cold=0.2, token_f1_cold=0.0), make_sample(rouge1_cold=0.4, token_f1_cold=0.1)]
    assert gate("rouge1", samples).value == pytest.approx(0.3)
    assert not gate("rouge1", samples).holds
    assert not gate("token_f1", samples).holds


def test_exact_match_drop_is_cold_minus_the_arm(make_sample):
    samples = [make_sample(arm="cold", exact_match=True) for _ in range(50)]
    samples += [make_sample(exact_match=index > 0) for index in range(50)]
    samples += [make_sample(expects="none", exact_match=False), make_sample(exact_match=None)]
    assert gate("exact_match_drop", samples).value == pytest.approx(0.02)
    assert gate("exact_match_drop", [make_sample(arm="cold", exact_match=None)]).value is None


def test_one_fire_on_an_unrelated_prompt_in_any_reusing_arm_fails(make_sample):
    quiet = make_sample(expects="none", reused_tokens=0)
    fired = gate("unrelated_fires", [quiet, make_sample(expects="none", arm="boundary", reused_tokens=64)])
    assert gate("unrelated_fires", [quiet]).holds
    assert (fired.value, fired.holds) == (1, False)
    assert gate("unrelated_fires", [make_sample()]).value is None


@pytest.mark.parametrize(
    "change", [{"exact_prefix_tokens": 1984}, {"reused_tokens": 15}, {"answer": "43"}, {"first_token_kl": 0.1}]
)
def test_a_repeat_must_be_served_from_the_exact_prefix_alone(make_sample, change):
    served = {"expects": "exact_prefix", "reused_tokens": 0, "first_token_kl": 0.0}
    served |= {"exact_prefix_tokens": 1999, "expected_exact_tokens": 1999}
    kept = [make_sample(**served, arm="exact_prefix"), make_sample(**served)]
    assert gate("exact_prefix_untouched", kept).value == 1.0
    touched = make_sample(**(served | change), arm="boundary")
    assert gate("exact_prefix_untouched", [*kept, touched]).value == 0.5


def test_reuse_beside_an_exact_prefix_is_allowed(make_sample):
    prefix = {"exact_prefix_tokens": 64, "expected_exact_tokens": 64}
    exact = make_sample(arm="exact_prefix", **prefix)
    assert gate("exact_prefix_untouched", [exact]).value is None
    assert gate("exact_prefix_untouched", [exact, make_sample(**prefix, reused_tokens=1800)]).value == 1.0


@pytest.mark.parametrize("name", [*BOUNDS][3:])
def test_counts_come_from_the_audit_log(make_sample, name):
    assert gate(name, [make_sample()]).holds
    assert not gate(name, [make_sample()], dict.fromkeys([*BOUNDS][3:], 0)).holds


@pytest.mark.parametrize(
    ("difference", "noise", "holds"), [(1e-5, 0.0, True), (math.inf, 0.0, False), (0.1, 0.1, True), (0.2, 0.1, False)]
)
def test_exactness_may_differ_by_the_engines_own_noise(make_sample, difference, noise, holds):
    assert gate("wrapper_exactness", [make_sample()]).value is None
    assert gate("wrapper_exactness", [make_sample()], exactness=Exactness(difference, "stock", noise)).holds is holds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("speedup", value) for value in (-1.0, math.nan, math.inf)],
        *[("rouge1", 1.01), ("token_f1", -0.1), ("token_f1", math.nan), ("semantic_hits", -1)],
    ],
)
def test_a_bound_out_of_range_is_refused(name, value):
    with pytest.raises(ConfigurationError, match="--min-" + name.replace("_", "-")):
        check_bounds({name: value})


def look(make_sample, measured, *arms):
    """A report of three prompts and a trap; each arm with its last answer, its speed-up, its answer on the trap."""
    samples = [make_sample(arm="cold", case_id=str(i), ttft_s=0.4, speedup=1.0, answer="7") for i in range(3)]
    samples.append(make_sample(arm="cold", case_id="t", workload="header_trap", ttft_s=9.9, answer="8"))
    for arm, answer, speedup, trapped in arms:
        samples += [make_sample(arm=arm, case_id=str(i), speedup=speedup, answer="7") for i in range(2)]
        samples.append(make_sample(arm=arm, case_id="2", timed=False, speedup=None, answer=answer))
        trap = {"case_id": "t", "workload": "header_trap", "speedup": 99.0, "answer": trapped}
        samples.append(make_sample(arm=arm, exact_match=trapped == "8", **trap))
        samples.append(make_sample(arm=arm, workload="unrelated", expects="none", reused_tokens=0))
    exactness = Gate("wrapper_exactness", 1.26e-5, 1e-4, "lower", "reads")
    return Report("tiny", "verified", samples, {}, "", [exactness], {}, measured, 1.0)


@pytest.mark.promise("commands", "`make validate` serves a part of...")
def test_the_headline_counts_what_changed_and_says_whether_the_trap_is_caught(make_sample, measured):
    unchecked, checked = ("position_fix", "6", 9.7, "1"), ("verified", "7", 2.0, "8")
    told = look(make_sample, measured, unchecked, checked).headline()
    assert told == (
        "a document that moved: 9.7x faster to the first token, 1 of 3 answers changed; checked: 2.0x, 0 of 4, the "
        "trap's among them; the trap that breaks unchecked reuse: caught"
    )
    lost = look(make_sample, measured, unchecked, ("verified", "7", 2.0, "1")).headline()
    assert lost.endswith(
        "1 of 4, the trap's among them; the trap that breaks unchecked reuse: NOT caught, 1 of 1 answers lost"
    )
    toothless = look(make_sample, measured, ("position_fix", "7", 9.7, "8"), checked).headline()
    assert toothless.endswith("the trap that breaks unchecked reuse: does not bite here")
    alone = look(make_sample, measured, unchecked).headline()
    assert alone.endswith("checked: not measured; the trap that breaks unchecked reuse: bites")
    assert look(make_sample, measured, checked).headline() == "checked: 2.0x, 0 of 4, the trap's among them"


def test_speed_and_tokens_are_over_timed_samples_answers_over_all(make_sample):
    samples = [make_sample(ttft_s=1.0, computed_tokens=90), make_sample(ttft_s=3.0, computed_tokens=110)]
    samples += [make_sample(ttft_s=9.0, computed_tokens=4, timed=False, speedup=None, exact_match=False)]
    [line] = summaries(samples)
    assert (line["samples"], line["timed"], line["ttft_median_s"], line["computed_tokens"]) == (3, 2, 2.0, 100)
    assert line["ttft_p95_s"] == pytest.approx(2.9)
    assert line["exact_match"] == pytest.approx(2 / 3)
    assert (line["fires"], line["outcomes"]) == (3, {"backend_materialized_reuse": 3})


def test_the_rows_of_a_run_have_their_names(make_sample, measured):
    samples = [make_sample(size=size, arm="cold", speedup=1.0, ttft_s=0.4) for size in ("2048", "4096")]
    samples += [make_sample(size="4096"), make_sample(arm="verified")]
    samples.append(make_sample(workload="unrelated", expects="none", reused_tokens=0))
    for arm, right in (("cold", True), ("position_fix", False), ("verified", True)):
        samples.append(make_sample(workload="header_trap", arm=arm, exact_match=right))
    rows = {row.name: row for row in end_to_end_rows(samples, Exactness(1e-5, "stock"), "cpu", measured)}
    names = ("shifted_4k_ttft_speedup", "verified_2k_ttft_speedup", "harmless_em_drop", "verified_em_drop")
    names += ("trap_position_fix_em", "unrelated_fires")
    assert list(rows) == [*(f"cpu_{name}" for name in names), "wrapper_exactness_max_logit_diff"]
    assert all(row.holds for row in rows.values())
    assert rows["cpu_shifted_4k_ttft_speedup"].value == rows["cpu_verified_2k_ttft_speedup"].value == 4.0
    assert "400 ms" in rows["cpu_shifted_4k_ttft_speedup"].baseline
    # The trap is no harmless prompt.
    assert (rows["cpu_verified_em_drop"].value, rows["cpu_harmless_em_drop"].value) == (0.0, 0.0)
    assert (rows["cpu_trap_position_fix_em"].value, rows["cpu_trap_position_fix_em"].goal) == (0.0, 0.5)
    assert not end_to_end_rows([make_sample(workload="prompts", size="any")], None, "cpu", measured)


CHROMIUM = shutil.which("chromium")
ATTACK = "<script>document.title = 'attacked'</script><img src=x onerror=\"document.title = 'attacked'\">"
ARMS = ("cold", "cold_again", "exact_prefix", "position_fix", "verified")


@pytest.fixture
def html(make_sample, measured):
    """The page of a run whose every text is an attack."""
    moved, document = f"moved {ATTACK}", f"{ATTACK} a document {'word ' * 200}"
    cases = [
        Case(name, workload, "2048", ("donor",), prompt, "42", True, Expectation.REUSE, name)
        for name, workload, prompt in ((moved, "reordered", document), ("trap", "header_trap", "x" * 3_000))
    ]
    said = {"answer": ATTACK, "spans": ((2, 50),)}
    samples = [make_sample(case_id=x.id, workload=x.workload, arm=arm, **said) for x in cases for arm in ARMS]
    gates = [Gate("speedup", 2.0, 1.05, "higher", ATTACK), Gate("rouge1", None, 0.35, "higher", "reads")]
    report = Report(f"model {ATTACK}", "verified", samples, {}, "", gates, {"prompts": ATTACK}, measured, 1.0, [ATTACK])
    return page(report, cases, byte_tokenizer())


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.promise(
    "commands",
    "The validation's page loads nothing, runs nothing of a prompt's text, and is legible and whole in a browser at "
    "a telephone's width",
)
def test_the_page_loads_nothing_and_no_text_of_a_run_becomes_a_part_of_it(html):
    tags = Tags(html).found
    assert not [attributes for tag, attributes in tags if tag == "script" or "onerror" in attributes]
    assert html.count("&lt;script&gt;document") == 16
    assert not [tag for tag, attributes in tags if attributes.keys() & {"src", "href"}]
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_reused_text_and_the_exact_prefix_are_marked(make_sample):
    sample = make_sample(exact_prefix_tokens=3, spans=((8, 2), (4, 2)))
    tokenizer = byte_tokenizer()
    pieces = marked(tokenizer, "abcdefghijkl", sample)
    assert pieces == [("exact", "abc"), ("", "d"), ("reused", "ef"), ("", "gh"), ("reused", "ij"), ("", "kl")]
    overlapping = make_sample(exact_prefix_tokens=5, spans=((4, 3),))
    assert marked(tokenizer, "abcdefgh", overlapping) == [("exact", "abcde"), ("reused", "fg"), ("", "h")]
    refused = make_sample(exact_prefix_tokens=0, reused_tokens=0, spans=((4, 2),))
    assert marked(tokenizer, "abc", refused) == [("", "abc")]


LOOK = """(document, getComputedStyle) => {
  const withText = [...document.querySelectorAll("body *")].filter(
    e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()));
  return {
    name: document.title, width: document.documentElement.scrollWidth, texts: withText.length,
    smallest: Math.min(...withText.map(e => parseFloat(getComputedStyle(e).fontSize))),
  };
}"""
# The page at a width, and a line that says what is seen of it.
FRAME = """<iframe id="page" width="{width}" height="740" srcdoc="{html}"></iframe><pre id="seen"></pre><script>
const page = document.getElementById("page"), look = {look};
page.onload = () => document.getElementById("seen").textContent = JSON.stringify(
  look(page.contentDocument, each => page.contentWindow.getComputedStyle(each)));
</script>"""


@pytest.mark.promise("commands", "The validation's page loads nothing, runs...")
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; `apt-get install chromium` brings it")
@pytest.mark.parametrize("width", [360, 1_280])
def test_a_browser_shows_it_whole_and_legible(html, tmp_path, width):
    path = tmp_path / "frame.html"
    path.write_text(FRAME.format(width=width, html=escape(html), look=LOOK), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    command = [str(CHROMIUM), *options, "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    seen = json.loads(unescape(re.search(r'<pre id="seen">(.+?)</pre>', dom)[1]))
    assert seen["name"] == f"Validation of SemBlend-TRT: model {ATTACK}"
    assert 0 < seen["width"] <= width
    assert seen["texts"] > 100
    assert seen["smallest"] >= 12
