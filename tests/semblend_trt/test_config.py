"""Every setting: where it is read from, which name wins, how a wrong value is told, and how `config` prints it."""

import json
import re
import traceback
from enum import Enum
from pathlib import Path
from typing import get_args

import pytest
from pydantic import SecretStr

from semblend_trt import config
from semblend_trt.cli.config import MASK, masked, settings_in_use
from semblend_trt.cli.main import main
from semblend_trt.config import Settings, load_settings, terms_of, variables_of
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import ReuseTerms, SpanCheck
from semblend_trt.policy import ReusePolicy
from tests.pages import Page, code_in

pytestmark = pytest.mark.usefixtures("no_settings")
# Values of settings whose type does not tell one.
TOLD = {
    "max_kl": "0.01",
    "nats_url": "nats://localhost:4222",
    "nats_subject": "events.donors",
    "nats_stream": "DONORS",
    "tenant_secret": "a long tenant secret",
}


def sample(name):
    """A text and its value, which is in the setting's range and is not its default."""
    field = Settings.model_fields[name]
    kind = next(each for each in (*get_args(field.annotation), field.annotation) if each is not type(None))
    if name == "max_kl":
        kind = float
    if kind is bool:
        return str(int(not field.default)), not field.default
    if issubclass(kind, Enum):
        other = next(each for each in kind if each is not field.default)
        return other.value, other
    least = next((getattr(bound, "ge", getattr(bound, "gt", None)) for bound in field.metadata), None)
    number = None if least is None else str(least + (2 if kind is int else 0.3))
    text = TOLD.get(name) or number or f"a {name}"
    return text, kind(text)


VARIABLES = [(name, variable) for name in Settings.model_fields for variable in variables_of(name)]


@pytest.mark.parametrize(("name", "variable"), VARIABLES, ids=[variable for _, variable in VARIABLES])
def test_every_variable_is_read(name, variable, monkeypatch):
    text, value = sample(name)
    assert getattr(load_settings(), name) != value
    monkeypatch.setenv(variable, f" {text} ")
    assert getattr(load_settings(), name) == value


@pytest.mark.promise(
    "commands", "Each variable is read as `TRTLLM_SEMBLEND_X`, then `SEMBLEND_X`, then under its older name"
)
def test_trtllm_name_wins_then_the_current_then_the_old_and_an_empty_one_is_unset(monkeypatch):
    names = ("SEMBLEND_TRTLLM_MIN_MATCH_LENGTH", "SEMBLEND_MIN_SPAN", "TRTLLM_SEMBLEND_MIN_SPAN")
    for number, name in enumerate(names, 100):
        monkeypatch.setenv(name, str(number))
        assert load_settings().min_span_tokens == number
    assert load_settings(min_span_tokens=103).min_span_tokens == 103
    monkeypatch.setenv(names[2], " ")
    monkeypatch.setenv("SEMBLEND_ADAPTER_ID", "")
    assert (load_settings().min_span_tokens, load_settings().adapter_id) == (101, None)


@pytest.mark.promise("commands", "A value out of range is refused by name; an unknown variable is warned about")
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SEMBLEND_MIN_SPAN", "0", r"SEMBLEND_MIN_SPAN is '0'; allowed is 1\.\.1048576"),
        ("SEMBLEND_TRTLLM_MIN_MATCH_LENGTH", "many", "MIN_MATCH_LENGTH is 'many', no whole number; allowed is 1"),
        ("TRTLLM_SEMBLEND_MIN_REUSE_RATIO", "1.5", r"^TRTLLM_SEMBLEND_MIN_REUSE_RATIO is '1.5'; allowed is 0\.0"),
        ("SEMBLEND_MIN_REUSE_RATIO", "half", "SEMBLEND_MIN_REUSE_RATIO is 'half', no number; allowed is 0"),
        ("SEMBLEND_ENABLED", "perhaps", "SEMBLEND_ENABLED is 'perhaps'; allowed is 0 or 1"),
        ("SEMBLEND_DONOR_TENANT", "x" * 257, r"SEMBLEND_DONOR_TENANT is 'x{80}'; allowed is a text of 1\.\.256"),
        ("SEMBLEND_EVENT_FORMAT", "xml", "SEMBLEND_EVENT_FORMAT is 'xml'; allowed is json, msgpack"),
        ("SEMBLEND_NATS_SUBJECT", "a b", "SEMBLEND_NATS_SUBJECT: 'a b' is no subject of letters"),
        ("SEMBLEND_NATS_STREAM", "a.b", "SEMBLEND_NATS_STREAM: 'a.b' is no stream of letters"),
        ("SEMBLEND_NATS_TOKEN", "secret" * 1000, "SEMBLEND_NATS_TOKEN is wrong; allowed is a text of 1..4096"),
        ("SEMBLEND_POLICY", "most", "SEMBLEND_POLICY: policy 'most' is not known; use one of off, exact"),
        *(
            ("SEMBLEND_MAX_KL", text, f"SEMBLEND_MAX_KL: '{text}' is no number of nats above 0; use one, rounding or")
            for text in ("0", "-1", "nan", "inf", "much")
        ),
        ("SEMBLEND_RISK", "0", r"SEMBLEND_RISK is '0'; allowed is 0\.001\.\.0\.999"),
    ],
)
def test_wrong_value_names_variable_value_and_bound(variable, value, told, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=told):
        load_settings()


@pytest.mark.promise("policies", "Settings that contradict one another are refused at the start")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_kl": "unbounded", "risk": 0.1}, "SEMBLEND_RISK is 0.1, but SEMBLEND_MAX_KL is unbounded"),
        ({"policy": "exact", "max_kl": 0.01}, "SEMBLEND_MAX_KL is set, but policy exact keeps no bound"),
        ({"policy": "position_fix", "risk": 0.1}, "SEMBLEND_RISK is set, but policy position_fix keeps no bound"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_in_one_sentence(given, told, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(variables_of(name)[1], str(value))
    with pytest.raises(ConfigurationError, match=f"^{told}"):
        load_settings()
    monkeypatch.setenv("SEMBLEND_POLICY", "verified")
    monkeypatch.delenv("SEMBLEND_RISK", raising=False)
    assert load_settings().policy is ReusePolicy.VERIFIED


def test_wrong_override_names_the_setting():
    with pytest.raises(ConfigurationError, match="min_span_tokens is '0'; allowed is 1"):
        load_settings(min_span_tokens=0)
    with pytest.raises(ConfigurationError, match="host_byte is not a setting; did you mean host_bytes"):
        load_settings(host_byte=1)
    with pytest.raises(ConfigurationError, match=r"min_span_tokens is '0'; .*\. max_donors is '0'; "):
        load_settings(min_span_tokens=0, max_donors=0)


ADDRESSES = [",", "http://alice:hunter2@host", "nats://alice:hunter2@host:99999", "alice hunter2", "nats://hunter2@"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *(("nats_url", each, "nats_url: this is no address such as") for each in ADDRESSES),
        ("nats_token", "hunter2" * 1000, "nats_token is wrong"),
    ],
)
def test_a_wrong_secret_is_refused_and_never_shown(name, value, told):
    with pytest.raises(ConfigurationError, match=told) as refused:
        load_settings(**{name: value})
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "url", ["localhost", "host-1.example:4222", "tls://u:p/w@[::1]:4222", "nats://a:1, nats://b:2,", "wss://h:443/nats"]
)
def test_addresses_of_nats(url):
    assert load_settings(nats_url=url).nats_url == SecretStr(url)


@pytest.mark.promise("commands", "A value out of range is...")
@pytest.mark.known_defect(34)
def test_unknown_variable_warns_once_with_the_nearest_name_and_a_retired_one_says_why(monkeypatch, caplog):
    others = "SEMBLEND_MIN_SPANS TRTLLM_SEMBLEND_ZZZZZZZZ SEMBLEND_DONOR_DTYPE TRTLLM_SEMBLEND_FUZZY_CHUNKS"
    for name in others.split():
        monkeypatch.setenv(name, "secret-value")
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "1024")
    for _ in range(2):
        load_settings()
    runs = "exact runs at any position are found without it; SEMBLEND_MIN_SPAN sets the shortest"
    assert [record.getMessage() for record in caplog.records] == [
        "SEMBLEND_DONOR_DTYPE is ignored: donors are kept in the dtype of the cache",
        "SEMBLEND_MIN_SPANS is not read by this version; did you mean SEMBLEND_MIN_SPAN?",
        f"TRTLLM_SEMBLEND_FUZZY_CHUNKS is ignored: {runs}",
        "TRTLLM_SEMBLEND_ZZZZZZZZ is not read by this version",
    ]


@pytest.mark.promise("commands", "`docs/configuration.md` lists every setting, and every...")
@pytest.mark.known_defect(34)
def test_every_setting_is_read_by_the_product():
    text = "\n".join(path.read_text() for path in Path(config.__file__).parent.rglob("*.py"))
    assert [name for name in Settings.model_fields if not re.search(rf"settings\.{name}\b", text)] == []


@pytest.mark.promise("commands", "`semblend-trt config` prints each setting, its...")
def test_no_secret_is_told(monkeypatch):
    monkeypatch.setenv("SEMBLEND_NATS_TOKEN", "hunter2")
    monkeypatch.setenv("SEMBLEND_NATS_URL", "nats://alice:hunter2@127.0.0.1:4222")
    rows = {row.name: row for row in settings_in_use(load_settings())}
    assert (rows["nats_token"].value, rows["nats_url"].value) == (MASK, MASK)
    assert "hunter2" not in repr(rows)


@pytest.mark.parametrize(
    ("text", "is_shown"),
    [
        *((text, True) for text in ("nats://127.0.0.1:4222", "tls://nats-0.example:4222, nats://[::1]:4222")),
        *((text, False) for text in ("token", "nats://alice@broker", "nats://alice:12,34@broker")),
        *((text, False) for text in ("nats://alice:secret", "nats://broker, alice:12@other")),
    ],
)
def test_an_address_without_a_user_is_no_secret_and_what_may_hold_a_password_is_masked(text, is_shown):
    assert masked(text) == (text if is_shown else MASK)


@pytest.mark.promise("policies", "`boundary`, `position_fix`, `epic` and `cacheblend` do what they are said to do")
@pytest.mark.parametrize(
    ("policy", "terms"),
    [
        *((each, None) for each in (ReusePolicy.OFF, ReusePolicy.EXACT, ReusePolicy.VERIFIED)),
        (ReusePolicy.POSITION_FIX, ReuseTerms()),
        (ReusePolicy.BOUNDARY, ReuseTerms(boundary=3)),
        (ReusePolicy.EPIC, ReuseTerms(head_tokens=24)),
        (ReusePolicy.CACHEBLEND, ReuseTerms(check=SpanCheck(layer=1, largest_share=0.3))),
    ],
)
def test_the_terms_of_a_policy(policy, terms):
    settings = Settings(recompute_boundary_layer=3, epic_tokens=24, cacheblend_share=0.3)
    assert terms_of(policy, settings, 24) == terms


@pytest.mark.parametrize(
    ("policy", "boundary", "layers", "lowest", "told"),
    [
        (ReusePolicy.BOUNDARY, 0, 24, 1, r"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is 0, outside 1\.\.24"),
        (ReusePolicy.BOUNDARY, 25, 24, 1, r"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is 25, outside 1\.\.24"),
        (ReusePolicy.CACHEBLEND, 0, 1, 1, "layer 1, and this model has 1 layer"),
        (ReusePolicy.CACHEBLEND, 0, 24, 2, "model's layers below 2 see no further than a window"),
    ],
)
def test_terms_that_the_model_has_no_layer_for_are_refused(policy, boundary, layers, lowest, told):
    with pytest.raises(ConfigurationError, match=told):
        terms_of(policy, Settings(recompute_boundary_layer=boundary), layers, lowest)


@pytest.fixture
def _settings(no_settings, monkeypatch):
    monkeypatch.setenv("TRTLLM_SEMBLEND_HOST_BYTES", "1024")
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "2048")
    monkeypatch.setenv("SEMBLEND_NATS_TOKEN", "hunter2")
    monkeypatch.setenv("SEMBLEND_POLICI", "off")


@pytest.mark.promise("commands", "`semblend-trt config` prints each setting, its value and source, and masks secrets")
@pytest.mark.usefixtures("_settings")
def test_a_line_a_setting(capsys):
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.splitlines()}
    assert len(lines) == len(Settings.model_fields)
    assert lines["SEMBLEND_POLICY"] == ["verified", "default"]
    told = "TRTLLM_SEMBLEND_HOST_BYTES (SEMBLEND_HOST_BYTES set too, and not read)"
    assert lines["SEMBLEND_HOST_BYTES"] == ["1024", told]
    assert "hunter2" not in shown


@pytest.mark.usefixtures("_settings")
def test_json(capsys):
    assert main(["config", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in told["settings"]}
    assert set(rows) == set(Settings.model_fields)
    sources = {"source": "TRTLLM_SEMBLEND_HOST_BYTES", "ignored": ["SEMBLEND_HOST_BYTES"]}
    assert rows["host_bytes"] == {"name": "host_bytes", "variable": "SEMBLEND_HOST_BYTES", "value": 1024} | sources
    assert rows["enabled"]["value"] is True
    assert rows["nats_token"]["value"] != "hunter2"
    assert told["unknown"] == {"SEMBLEND_POLICI": "SEMBLEND_POLICY"}


@pytest.mark.promise("commands", "`docs/configuration.md` lists every setting, and every setting is read")
@pytest.mark.usefixtures("_settings")
def test_the_page_in_the_repository_is_that_of_the_code(capsys):
    """`semblend-trt config --markdown > docs/configuration.md` makes it."""
    page = Page("docs/configuration.md")
    assert main(["config", "--markdown"]) == 0
    assert page.text == capsys.readouterr().out
    rows = [code_in(row[0])[0] for row in page.rows if "`" in row[0]]
    assert sorted(rows) == sorted(variables_of(name)[1] for name in Settings.model_fields)
