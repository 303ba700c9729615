"""`semblend-trt events tail` and `fleet status` against a real server: every event a line, what is wrong a sentence."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from semblend_trt.cli.fleet import fields_apart
from semblend_trt.cli.main import main
from semblend_trt.config import EventFormat
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.namespace import unknown_value
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, text
from tests.server_process import environment

SKETCH = sketch_of(text(1, 100), sketch_key(NAMESPACE.key, None)).to_bytes()
COMMAND = "import sys; from semblend_trt.cli.main import main; sys.exit(main())"


class Listening:
    """`semblend-trt events tail` or `fleet status` as a process that listens already."""

    def __init__(self, url, action, *arguments):
        subcommand = "events" if action == "tail" else "fleet"
        command = [sys.executable, "-c", COMMAND, subcommand, action, "--url", url, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=environment(), **pipes)
        assert self._process.stderr.readline().startswith("listening on semantic-kv-events")

    def end(self):
        output, _ = self._process.communicate(timeout=120)
        return self._process.returncode, output


def events(generation=7):
    """A worker's short life: a reset, a heartbeat that says that it holds nothing, and its last word."""
    writer = EventWriter(Emitter(3, 0, generation), EventFormat.JSON)
    return [notice.payload for notice in (writer.reset(), writer.heartbeat(10.0, 0, 0), writer.purged())]


@pytest.fixture
def listen(nats_server, reader):
    """listen(action, payloads, *arguments): the status and output of the command that saw these messages."""

    def run(action, payloads, *arguments):
        listening = Listening(nats_server.url, action, "--limit", str(len(payloads)), *arguments)
        for payload in payloads:
            reader.publish(payload)
        return listening.end()

    return run


@pytest.mark.promise(
    "fleet",
    "`semblend-trt events tail` prints every event; `fleet status` counts and checks, with status 1 when it finds "
    "something wrong",
)
def test_tail_prints_a_line_an_event(listen):
    status, output = listen("tail", [*events(), b"garbage"])
    assert status == 0
    starts = (
        "3.0 #1 provider_generation_reset generation=7",
        "3.0 #2 provider_heartbeat interval_seconds=10.0 donor_count=0 state_digest=0 provider_generation=7",
        "3.0 #3 donors_purged",
        "not an event (7 bytes): malformed",
    )
    assert [line[: len(start)] for line, start in zip(output.splitlines(), starts, strict=True)] == [*starts]
    status, output = listen("tail", events(), "--json")
    assert status == 0
    assert [json.loads(line)["event_id"] for line in output.splitlines()] == [1, 2, 3]


def test_a_forged_event_is_shown_and_does_nothing(listen):
    forged = json.loads(events()[0])
    forged["data"]["kind"] = "x\x1b[2J\x9b1m\r\n\u202e"
    payloads = [json.dumps(forged).encode(), b'{"\x1b[2J\xc2\x9b']
    status, output = listen("tail", payloads)
    assert status == 0
    assert len(output.splitlines()) == 2
    assert output.replace("\n", "").isprintable()
    assert r"x\x1b[2J\x9b1m\r\n\u202e" in output
    for action in (("tail", "--json"), ("status",)):
        _, output = listen(action[0], payloads[:1], *action[1:])
        assert output.replace("\n", "").isprintable()
        assert json.loads(output)


@pytest.mark.promise("fleet", "`semblend-trt events tail` prints every event;...")
def test_status_tells_what_is_wrong(listen):
    status, output = listen("status", events())
    report = json.loads(output)
    assert (status, report["problems"], report["faults"]) == (0, {}, {})
    assert [worker["heartbeats_compared"] for worker in report["workers"]] == [1]
    first, second, third = events()
    status, output = listen("status", [first, third, second, b"garbage", events(3)[0]])
    assert status == 1
    for told in ('"gap": 1', '"duplicate": 1', '"malformed": 1', "two processes may have this worker id"):
        assert told in output


@pytest.mark.promise("fleet", "`semblend-trt events tail` prints every event;...")
def test_status_says_who_holds_how_much(listen):
    writer = EventWriter(Emitter(3, 0, 7), EventFormat.MSGPACK)
    notices = [writer.reset()]
    notices += [writer.registered(f"d{number}", NAMESPACE, "host", 100, 1, SKETCH) for number in range(3)]
    notices += [writer.relocated("d1", "device"), writer.evicted("d2")]
    status, output = listen("status", [notice.payload for notice in notices])
    assert status == 0, output
    (worker,) = json.loads(output)["workers"]
    assert worker["events"]["donor_registered"] == 3
    held = {"generation": 7, "donors": 2, "tokens": {"host": 100, "device": 100}, "tenants": 1}
    assert worker | held | {"name": "3.0"} == worker


@pytest.mark.promise("fleet", "`semblend-trt fleet status` says who is...")
def test_the_fields_that_keep_namespaces_apart_are_named():
    one = BASE_NAMESPACE.for_request("acme", "adapter")
    same = BASE_NAMESPACE.for_request(None, None)
    other = replace(BASE_NAMESPACE, kv_dtype="fp8", rope_config={"rope_type": "default", "rope_theta": 5})
    assert fields_apart({"1.0": [one], "2.0": [same]}) == []
    assert fields_apart({"1.0": [one], "2.0": [other.for_request(None, None)]}) == [
        "namespaces do not meet in kv_dtype: 'bfloat16' on 1.0; 'fp8' on 2.0",
        "namespaces do not meet in rope_config.rope_theta: 1000000 on 1.0; 5 on 2.0",
    ]
    unknown = [replace(BASE_NAMESPACE, model_revision=unknown_value()).for_request(None, None) for _ in range(2)]
    assert fields_apart({"1.0": unknown[:1], "2.0": unknown[1:]}) == [
        "namespaces do not meet in model_revision: not determined on 1.0, 2.0"
    ]


def test_a_server_that_dies_ends_it_with_two(nats_server):
    listening = Listening(nats_server.url, "tail")
    nats_server.kill()
    assert listening.end()[0] == 2


def test_a_server_that_is_not_there_is_named(make_nats_server, capsys):
    server = make_nats_server()
    server.kill()
    assert main(["fleet", "status", "--url", server.url]) == 2
    assert f"NATS is out of reach at {server.url} (NoServersError); start it, or give" in capsys.readouterr().err
    assert main(["fleet", "status", "--url", "http://alice:hunter2@nowhere"]) == 2
    assert "hunter2" not in capsys.readouterr().err
