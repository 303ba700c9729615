"""Documents that were sent ahead are reused by the first request; a second run goes on where the first one ended."""

import asyncio
import json
import os
import random
import signal
import threading
import urllib.request
from contextlib import contextmanager

import pytest
from aiohttp import web

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig
from engine_wrapper.embedded.server import Worker
from semblend_trt.cli._server import MAX_PAUSE, pause
from semblend_trt.cli.main import main
from semblend_trt.cli.warm import STATE_NAME
from tests.pages import ROOT
from tests.semblend_trt.held_donors import at_once
from tests.server_process import MODEL, answering, listening_app
from validation.documents import stock_list
from validation.prompts import render

# One token a byte.
PAGE = (ROOT / "validation/assets/excerpt.txt").read_text(encoding="ascii", errors="ignore")
PAGES = [PAGE[start : start + 300] for start in (0, 300, 600)]


@pytest.fixture
def llm(tiny_qwen2_path, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    return LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512, kv_connector_config=KvCacheConnectorConfig.ours())


@contextmanager
def serving(llm):
    """The address of a worker of the name tiny."""
    worker = Worker(llm, "tiny")
    with listening_app(worker.app()) as address:
        yield address
    worker.close()


@pytest.fixture
def url(llm):
    with serving(llm) as address:
        yield address


@pytest.fixture
def pages(tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, page in zip(paths, PAGES, strict=True):
        path.write_text(page)
    return paths


def warm(url, *words):
    return main(["warm", "--url", url, *map(str, words)])


def await_donors(llm, number):
    """The worker goes on saving while nothing runs."""
    while llm.connector_scheduler.donor_index.held().donors < number:
        pass


def completed(url, prompt, **fields):
    """The answer's text, and the usage."""
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as response:
        told = json.load(response)
    return told["choices"][0]["text"].strip(), told["usage"]


def reused(url, prompt, **fields):
    return completed(url, prompt, **fields)[1]["prompt_tokens_details"]["reused_tokens"]


@pytest.mark.promise(
    "donors",
    "`semblend-trt warm` sends documents that the first request reuses after other text, and a second run goes on "
    "where the first ended",
)
def test_the_first_request_reuses_a_document_behind_other_text(llm, url, pages, capsys):
    assert warm(url, *pages, "--priority", 1, "--concurrency", 2) == 0
    assert capsys.readouterr().out == "3 documents sent (900 tokens), 0 sent before, 0 failed\n"
    await_donors(llm, 3)
    for page in PAGES:
        assert reused(url, f"Read this: {page} What is it?") == len(page)
    assert reused(url, f"Look at this: {PAGE[:300]}!", cache_salt="another") == 0


@pytest.mark.promise("donors", "`semblend-trt warm` sends documents that the...")
def test_under_a_profile_documents_behind_the_beginning_of_prompts_are_reused_at_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMBLEND_PROFILE", str(MODEL / "reuse-profile.json"))
    generator = random.Random(0)
    first, second, *lists = [stock_list(generator, rows=12) for _ in range(8)]
    corpus, prefix, question = tmp_path / "corpus.jsonl", tmp_path / "prefix", lists[2].questions[0]
    corpus.write_text("\n".join(json.dumps({"text": each.text}) for each in lists))
    prefix.write_text(render("Answer briefly.", [first.text, second.text, "|"], "").partition("|<|")[0])
    llm = LLM(MODEL, dtype="float32", kv_connector_config=KvCacheConnectorConfig.ours())
    prompt = render("Look up what is asked for.", [each.text for each in lists], question.text)
    with serving(llm) as url:
        assert warm(url, corpus, "--salt", "bare") == 0
        assert warm(url, corpus, "--prefix", prefix) == 0
        await_donors(llm, 2 * len(lists))
        bare, (answer, usage) = reused(url, prompt, cache_salt="bare"), completed(url, prompt)
    assert answer == question.answer
    assert usage["prompt_tokens_details"]["reused_tokens"] > usage["prompt_tokens"] // 2 > 2 * bare


@pytest.mark.promise("donors", "`semblend-trt warm` sends documents that the...")
def test_a_second_run_goes_on_and_sends_what_has_changed(url, pages, capsys):
    assert warm(url, pages[0]) == 0
    assert capsys.readouterr().out == "1 document sent (300 tokens), 0 sent before, 0 failed\n"
    changed, other = pages[0].read_text() + PAGE[300:400], pages[0].with_name("other.json")
    for words, content, sent in (
        ([], PAGES[0], "2 documents sent (600 tokens), 1 sent before"),
        ([], PAGES[0], "0 documents sent (0 tokens), 3 sent before"),
        ([], changed, "1 document sent (400 tokens), 2 sent before"),
        *((words, changed, "3 documents sent") for words in (["--salt", "a"], ["--state", other])),
    ):
        pages[0].write_text(content)
        assert warm(url, *pages, *words) == 0
        assert capsys.readouterr().out.startswith(sent)
    assert len(json.loads(pages[0].with_name(STATE_NAME).read_text())["warmed"]) == 7


@pytest.mark.promise(
    "donors",
    "A document or line that it cannot read or that the server refuses is named, and the rest goes on; it ends with "
    "2 when nothing could be sent",
)
def test_what_cannot_be_read_or_held_is_named_and_the_rest_goes_on(url, tmp_path, capsys):
    lines, binary, missing = tmp_path / "all.jsonl", tmp_path / "binary", tmp_path / "missing"
    good = json.dumps({"text": PAGE[:100]})
    long = json.dumps({"text": PAGE[:600]})
    lines.write_text(f'{good}\n{{"text": \n\n["{PAGE[:5]}"]\n{{"text": " "}}\n{long}\n{good}\n{{"text": "\\ud800"}}')
    binary.write_bytes(b"abc\xff")
    assert warm(url, lines, binary, missing) == 0
    out, err = capsys.readouterr()
    assert out == "1 document sent (100 tokens), 1 sent before, 7 failed\n"
    told = dict(line.removeprefix(f"{tmp_path}/").partition(": ")[::2] for line in err.splitlines())
    assert "600 tokens with 1 new ones exceeds max_seq_len 512" in told.pop("all.jsonl:6")
    assert "lone surrogate" in told.pop("all.jsonl:8")
    assert told == {
        "all.jsonl:2": 'the line is not JSON; give {"text": "..."}',
        "all.jsonl:4": 'the line has no text; give {"text": "..."}',
        "all.jsonl:5": "the document is empty; give it text, or leave it out",
        "binary": "byte 0xff at 3 is not UTF-8; write the document in UTF-8",
        "missing": "it cannot be read (No such file or directory); name another file",
    }
    assert warm(url, binary, missing) == 2
    assert capsys.readouterr().out.startswith("0 documents sent (0 tokens), 0 sent before, 2 failed")


@pytest.mark.promise("donors", "A document or line that it...")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "other"], "cannot be used (404: this worker serves the model tiny alone)"),
        (["--state", "{page}"], "is no state of this command; name another with --state"),
        (["--state", "/dev/null/state"], "cannot be written"),
        (["--api-key", "\n1"], "the API key has characters that no header takes"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 is out of reach (Connection refused)"),
    ],
)
def test_what_cannot_be_used_ends_with_two(url, pages, words, told, capsys):
    assert warm(url, pages[0], *(word.format(page=pages[1]) for word in words)) == 2
    assert told in capsys.readouterr().err
    assert pages[1].read_text() == PAGES[1]


def test_a_busy_server_is_asked_again_with_the_same_fields(pages, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    asked = []

    async def complete(request):
        asked.append((request.headers["Authorization"], await request.json()))
        if len(asked) < 3:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"usage": {"prompt_tokens": 9}})

    with answering(complete) as address:
        words = ["--model", "m", "--salt", "s", "--priority", 3]
        assert warm(f"{address}/at/v1", pages[0], *words) == 0
    assert capsys.readouterr().out.startswith("1 document sent (9 tokens)")
    fields = {"model": "m", "max_tokens": 1, "temperature": 0, "cache_salt": "s", "priority": 3, "prompt": PAGES[0]}
    fields["kv_transfer_params"] = {"semblend.exact_only": True}
    assert asked == [("Bearer of the environment", fields)] * 3


def test_an_interrupt_waits_for_no_request_and_forgets_none_that_was_answered(pages, capsys):
    main_thread, asked, ended = threading.get_ident(), [], threading.Event()

    async def complete(request):
        asked.append(request)
        if len(asked) == 2:
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.to_thread(ended.wait)
        return web.json_response({"usage": {"prompt_tokens": 9}})

    with answering(complete) as address:
        assert warm(address, *pages, "--model", "m") == 130
        assert not ended.is_set()
        ended.set()
        told = "1 document sent (9 tokens), 0 sent before, 0 failed\n"
        assert capsys.readouterr() == (told, "semblend-trt: interrupted\n")
        assert warm(address, *pages, "--model", "m") == 0
    assert capsys.readouterr().out == "2 documents sent (18 tokens), 1 sent before, 0 failed\n"


@pytest.mark.promise("donors", "No file that a command is...")
@pytest.mark.parametrize(
    ("answer", "count"),
    [
        *(("", "null"), ("\xff", '"9"'), ("null", "true"), ("[]", "9.5"), ("{}", "NaN"), ("[" * 5000, "[" * 5000)),
        *(('{"data": [{"id": 7}]}', "-1"), ('{"error": {"message": [[]]}}', "9" * 5000)),
    ],
)
def test_an_answer_without_tokens_or_model_is_one_sentence(answer, count, pages, capsys):
    tokens = f'{{"usage": {{"prompt_tokens": {count}}}}}'
    for body, words, told in (
        (answer, [], "names no model (status 200); give it with --model\n"),
        (tokens, ["--model", "m"], "cannot be used (status 200); the next run goes on from here\n"),
    ):
        with answering(body.encode("latin-1")) as address:
            assert warm(address, pages[0], *words) == 2
        assert capsys.readouterr().err == f"semblend-trt: {address} {told}"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("0", 0), (" 7 ", 7), ("61", MAX_PAUSE), ("9" * 5000, MAX_PAUSE)),
        *((each, 3) for each in ("", "-1", "1.5", "\u00b2", "Thu, 01 Jan 1970 00:00:00 GMT")),
    ],
)
def test_how_long_a_busy_server_is_left_alone(header, seconds):
    assert pause(header, 3.0) == seconds


@pytest.mark.promise("donors", "No file that a command is...")
def test_what_is_no_file_is_named_and_not_waited_for(url, pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("semblend_trt.files.MAX_LINE_BYTES", 1 << 12)
    pipe, lines, latin = tmp_path / "pipe", tmp_path / "lines.jsonl", tmp_path / "latin"
    os.mkfifo(pipe)
    lines.write_text(f'{{"text": "{"a" * 5000}"}}\n' + json.dumps({"text": PAGE[:50]}) + "\n" + "[" * 4000)
    latin.write_bytes(b"a\n\xe9")
    assert at_once(lambda: warm(url, pipe, "/dev/zero", lines, tmp_path)) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 document sent (50 tokens), 0 sent before, 5 failed")
    named = dict(line.split(": ", 1) for line in err.splitlines())
    no_file = "it cannot be read (it is not a regular file; a pipe can be given as /dev/stdin); name another file"
    assert named[str(pipe)] == named["/dev/zero"] == no_file
    assert named[f"{lines}:1"] == "the line is longer than 0 MiB; give a shorter one"
    assert named[f"{lines}:3"] == 'the line is not JSON; give {"text": "..."}'
    for words, told in (
        (["--prefix", latin], f"{latin}, line 2: byte 0xe9 is not UTF-8; write the file in UTF-8"),
        *((["--prefix", each], "it is not a regular file") for each in (pipe, "/dev/zero")),
        *((["--state", each], f"{each} is no state of this command") for each in (pipe, "/dev/zero")),
    ):
        assert at_once(lambda words=words: warm(url, pages[0], *words)) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert told in sentence


@pytest.mark.parametrize("kept", ["", "7", "[]", "{}", "[" * 5000, *map('{{"warmed": {}}}'.format, (7, [7], [[]]))])
def test_what_is_no_state_is_refused(kept, pages, tmp_path, capsys):
    (tmp_path / "kept").write_text(kept)
    assert warm("http://127.0.0.1:1", pages[0], "--model", "m", "--state", tmp_path / "kept") == 2
    assert "kept is no state of this command; name another with --state" in capsys.readouterr().err
