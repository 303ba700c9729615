"""Connections as the settings ask for them: with a credentials file against a server that takes nobody else."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from semblend_trt.config import load_settings
from semblend_trt.fleet.connection import ConnectionOptions

if TYPE_CHECKING:
    from pathlib import Path


UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
ACCOUNT_LIMITS = UNLIMITED | {"conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True}


class Signer:
    """A NATS identity: an operator, an account or a user."""

    def __init__(self, prefix: int) -> None:
        import nkeys

        self.seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.name = self._pair.public_key.decode()

    def token(self, subject: Signer, kind: str, **claims: Any) -> str:
        """A JWT in which this identity vouches for `subject`."""
        body = {"jti": subject.name, "iat": 1, "iss": self.name, "name": kind, "sub": subject.name}
        body["nats"] = claims | {"type": kind, "version": 2}
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = b".".join(_base64(json.dumps(part).encode()) for part in (head, body))
        return (signed + b"." + _base64(self._pair.sign(signed))).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def credentials(account: Signer, folder: Path) -> Path:
    """A credentials file of a user of the account."""
    import nkeys

    user = Signer(nkeys.PREFIX_BYTE_USER)
    path = folder / f"{user.name}.creds"
    parts = (("NATS USER JWT", account.token(user, "user", **UNLIMITED)), ("USER NKEY SEED", user.seed.decode()))
    path.write_text("".join(f"-----BEGIN {name}-----\n{text}\n------END {name}------\n\n" for name, text in parts))
    return path


@pytest.fixture
def account():
    nkeys = pytest.importorskip("nkeys")
    return Signer(nkeys.PREFIX_BYTE_ACCOUNT)


@pytest.fixture
def server(make_nats_server, account, tmp_path):
    """A server that takes only users for whom the account vouches, for which an operator does."""
    import nkeys

    operator, system = Signer(nkeys.PREFIX_BYTE_OPERATOR), Signer(nkeys.PREFIX_BYTE_ACCOUNT)
    configuration = {
        "operator": operator.token(operator, "operator"),
        "system_account": system.name,
        "resolver": "MEMORY",
        "resolver_preload": {
            each.name: operator.token(each, "account", limits=ACCOUNT_LIMITS) for each in (account, system)
        },
    }
    path = tmp_path / "server.conf"
    path.write_text(json.dumps(configuration))
    return make_nats_server("-c", str(path))


def test_a_credentials_file_opens_the_server(server, account, make_reader, make_worker, tmp_path) -> None:
    creds = credentials(account, tmp_path)
    reader = make_reader(server.url, user_credentials=str(creds))
    worker = make_worker(server, creds=creds)
    worker.add("a")
    assert reader.wait_for(lambda reader: list(reader.directory.donors_of((3, 0))) == ["a"])


@pytest.mark.parametrize("kind", ["none", "another account's", "no file", "garbage"])
def test_without_its_credentials_nothing_is_sent(server, make_worker, tmp_path, kind, caplog) -> None:
    creds = None
    if kind == "another account's":
        import nkeys

        creds = credentials(Signer(nkeys.PREFIX_BYTE_ACCOUNT), tmp_path)
    elif kind != "none":
        creds = tmp_path / "user.creds"
        if kind == "garbage":
            creds.write_bytes(b"\xff not credentials")
    worker = make_worker(server, creds=creds)
    worker.add("a")
    assert not worker.publisher.settle(0.5)
    assert worker.counters.connections == 0
    assert "a turn of the event publisher failed" not in caplog.text


def test_options_hold_what_the_settings_say_and_show_no_secret(tmp_path) -> None:
    settings = load_settings(
        nats_url="nats://user:secret@one:4222, nats://two:4222", nats_token="secret", nats_creds=tmp_path / "user.creds"
    )
    options = ConnectionOptions.of(settings)
    assert options.servers == ("nats://user:secret@one:4222", "nats://two:4222")
    assert "secret" not in repr(options)
    arguments = options.client_arguments()
    assert (arguments["token"], arguments["user_credentials"]) == ("secret", str(tmp_path / "user.creds"))
    assert not arguments["allow_reconnect"]
    assert ConnectionOptions.of(load_settings()) is None
