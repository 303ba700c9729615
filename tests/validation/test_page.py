"""The page of a run: what it holds, that it escapes all text, and how a browser shows it at a telephone's width."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from html.parser import HTMLParser

import aiohttp
import pytest

from validation.cases import Case, Expectation
from validation.page import marked, page
from validation.report import Gate, Report

CHROMIUM = shutil.which("chromium")
ATTACK = "<script>document.title = 'attacked'</script><img src=x onerror=\"document.title = 'attacked'\">"
ARMS = ("cold", "cold_again", "exact_prefix", "position_fix", "verified")


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text):
        return list(map(ord, text))

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


@pytest.fixture
def html(make_sample, measured):
    """The page of a run whose every text is an attack."""
    moved, document = f"moved {ATTACK}", f"{ATTACK} a document {'word ' * 200}"
    cases = [
        Case(name, workload, "2048", ("donor",), prompt, "42", True, Expectation.REUSE, name)
        for name, workload, prompt in ((moved, "reordered", document), ("trap", "header_trap", "x" * 3_000))
    ]
    samples = [
        make_sample(case_id=each.id, workload=each.workload, arm=arm, answer=ATTACK, spans=((2, 50),))
        for each in cases
        for arm in ARMS
    ]
    gates = [Gate("speedup", 2.0, 1.05, "higher", ATTACK), Gate("rouge1", None, 0.35, "higher", "reads")]
    report = Report(f"model {ATTACK}", "verified", samples, {}, "", gates, {"prompts": ATTACK}, measured, 1.0, [ATTACK])
    return page(report, cases, Letters())


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_no_text_of_a_run_becomes_a_part_of_the_page(html):
    tags = Tags(html).found
    assert not [attributes for tag, attributes in tags if tag == "script" or "onerror" in attributes]
    assert html.count("&lt;script&gt;document") == 16


def test_the_page_loads_nothing(html):
    assert not [tag for tag, attributes in Tags(html).found if attributes.keys() & {"src", "href"}]
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_reused_text_and_the_exact_prefix_are_marked(make_sample):
    sample = make_sample(exact_prefix_tokens=3, spans=((8, 2), (4, 2)))
    pieces = marked(Letters(), "abcdefghijkl", sample)
    assert pieces == [("exact", "abc"), ("", "d"), ("reused", "ef"), ("", "gh"), ("reused", "ij"), ("", "kl")]
    overlapping = make_sample(exact_prefix_tokens=5, spans=((4, 3),))
    assert marked(Letters(), "abcdefgh", overlapping) == [("exact", "abcde"), ("reused", "fg"), ("", "h")]
    refused = make_sample(exact_prefix_tokens=0, reused_tokens=0, spans=((4, 2),))
    assert marked(Letters(), "abc", refused) == [("", "abc")]


@contextmanager
def browser(folder):
    """The address at which a new browser takes commands."""
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0", "about:blank"),
    ]
    with subprocess.Popen([str(CHROMIUM), *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            addresses = (re.search(r"listening on (ws://\S+)", line) for line in process.stderr)
            yield next(found[1] for found in addresses if found)
        finally:
            process.terminate()


class Tab:
    """Commands to one tab, and the events that came meanwhile (Chrome DevTools Protocol)."""

    def __init__(self, socket):
        self.socket, self.session, self.number, self.events = socket, {}, 0, []

    async def ask(self, method, **params):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": params, **self.session})
        return (await self.until("id", self.number))["result"]

    async def until(self, key, value):
        while not (found := [each for each in self.events if each.get(key) == value]):
            self.events.append(json.loads(await self.socket.receive_str()))
        return found[0]


async def looked_at(address, path, width):
    """What the page is in the browser, and the addresses that it asked for."""
    async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=1 << 26) as socket:
        tab = Tab(socket)
        target = (await tab.ask("Target.createTarget", url="about:blank"))["targetId"]
        attached = await tab.ask("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network"):
            await tab.ask(f"{domain}.enable")
        size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        await tab.ask("Emulation.setDeviceMetricsOverride", **size)
        await tab.ask("Page.navigate", url=path.as_uri())
        await tab.until("method", "Page.loadEventFired")
        found = await tab.ask("Runtime.evaluate", expression=LOOK, returnByValue=True)
        sent = [each for each in tab.events if each.get("method") == "Network.requestWillBeSent"]
        return found["result"]["value"], [each["params"]["request"]["url"] for each in sent]


# Contrast as WCAG 2.2 defines it.
LOOK = """(() => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const numbers = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  const contrast = e => {
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); };
  const all = [...document.querySelectorAll("body *")];
  const withText = all.filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()));
  const scrolls = all.filter(e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX));
  return {
    title: document.title, language: document.documentElement.lang,
    width: document.documentElement.scrollWidth,
    levels: [...document.querySelectorAll("h1, h2, h3, h4")].map(h => Number(h.tagName[1])),
    contrast: Math.min(...withText.map(contrast)), texts: withText.length,
    unreachable: scrolls.filter(e => e.tabIndex < 0 || !e.getAttribute("aria-label")).length,
    smallest: Math.min(...withText.map(e => parseFloat(getComputedStyle(e).fontSize))),
    unnamed: [...document.querySelectorAll("table")].filter(t => !t.caption || !t.querySelector("th[scope]")).length,
  };
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; `apt-get install chromium` brings it")
@pytest.mark.parametrize("width", [360, 1_280])
def test_a_browser_shows_it_whole_and_legible_and_asks_for_nothing(html, tmp_path, width):
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    with browser(tmp_path) as address:
        seen, asked = asyncio.run(asyncio.wait_for(looked_at(address, path, width), 60))
    assert asked == [path.as_uri()]
    assert (seen["title"], seen["language"]) == (f"Validation of SemBlend-TRT: model {ATTACK}", "en")
    assert seen["width"] <= width
    levels = seen["levels"]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    assert seen["texts"] > 100
    assert seen["contrast"] >= 4.5
    assert seen["smallest"] >= 12
    assert (seen["unreachable"], seen["unnamed"]) == (0, 0)
