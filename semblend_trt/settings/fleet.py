"""Settings of what the fleet is told of this worker's donors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.wire import EventFormat
from semblend_trt.settings.environment import SettingsGroup, Variable

# Addresses as nats-py reads them; the user and the password may be any text.
_SERVER = re.compile(
    r"(?:(?:nats|tls|ws|wss)://)?(?:(?!\w+://)\S+@)?(?:[\w.\-]+|\[[\da-fA-F:]+\])(?::(\d{1,5}))?(?:/[^\s@]*)?"
)


def _is_server(address: str) -> bool:
    found = _SERVER.fullmatch(address)
    return found is not None and 0 < int(found[1] or 1) < 1 << 16


def _checked_servers(url: SecretStr | None) -> SecretStr | None:
    if url is not None:
        addresses = [address for each in url.get_secret_value().split(",") if (address := each.strip())]
        if not addresses or not all(_is_server(address) for address in addresses):
            raise ConfigurationError(
                "this is no address such as nats://localhost:4222 (with nats, tls, ws or wss), nor several with commas "
                "between them"
            )
    return url


def _checked_subject(subject: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", subject):
        raise ConfigurationError(f"subject {subject[:80]!r} is not of letters, digits, _ and -, with dots in between")
    return subject


def _checked_stream(stream: str | None) -> str | None:
    if stream is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", stream):
        raise ConfigurationError(f"stream {stream[:80]!r} is not of letters, digits, _ and - alone")
    return stream


class FleetSettings(SettingsGroup):
    # Secret: it may hold a user's password.
    nats_url: Annotated[SecretStr | None, AfterValidator(_checked_servers), Variable("NATS_URL")] = Field(
        None,
        min_length=1,
        max_length=4096,
        description="NATS server, or several with commas between them, to which donor events go; unset, none are sent.",
    )
    nats_subject: Annotated[str, AfterValidator(_checked_subject), Variable("NATS_SUBJECT")] = Field(
        "semantic-kv-events",
        min_length=1,
        max_length=256,
        description="Subject of donor events; requests for all donors anew are read from the same with .resync behind.",
    )
    nats_subject_per_worker: Annotated[bool, Variable("NATS_SUBJECT_PER_WORKER")] = Field(
        False,
        description="Donor events go to the subject with .<worker id> behind it, and readers believe a worker's from "
        "there only, so that NATS permissions can keep one worker from speaking for another.",
    )
    nats_stream: Annotated[str | None, AfterValidator(_checked_stream), Variable("NATS_STREAM")] = Field(
        None,
        min_length=1,
        max_length=256,
        description="JetStream stream that acknowledges and keeps donor events, made where it is missing; unset, core "
        "NATS carries them.",
    )
    nats_tls_ca: Annotated[Path | None, Variable("NATS_TLS_CA")] = Field(
        None, description="PEM file of the authorities that may have signed the NATS server's certificate."
    )
    nats_tls_cert: Annotated[Path | None, Variable("NATS_TLS_CERT")] = Field(
        None, description="PEM file of this client's certificate for NATS."
    )
    nats_tls_key: Annotated[Path | None, Variable("NATS_TLS_KEY")] = Field(
        None, description="PEM file of the private key of that certificate, where it is not in the same file."
    )
    nats_creds: Annotated[Path | None, Variable("NATS_CREDS")] = Field(
        None, description="Credentials file of a NATS user."
    )
    nats_token: Annotated[SecretStr | None, Variable("NATS_TOKEN")] = Field(
        None, min_length=1, max_length=4096, description="Token for NATS."
    )
    event_format: Annotated[EventFormat, Variable("EVENT_FORMAT")] = Field(
        EventFormat.JSON, description="How donor events are written."
    )
    event_embeddings: Annotated[bool, Variable("EVENT_EMBEDDINGS")] = Field(
        False, description="Send donors' embeddings too, where there are any; texts can be guessed from them."
    )
    worker_id: Annotated[int | None, Variable("WORKER_ID")] = Field(
        None,
        ge=0,
        le=(1 << 53) - 1,
        description="Number of this worker in the fleet; unset, that behind the last hyphen of the host's name, or 0.",
    )
    heartbeat_seconds: Annotated[float, Variable("HEARTBEAT_SECONDS")] = Field(
        10.0, ge=0.1, le=3600.0, description="A heartbeat goes out this often; readers give a silent worker up."
    )
    resync_seconds: Annotated[float, Variable("RESYNC_SECONDS")] = Field(
        300.0,
        ge=0.0,
        le=86400.0,
        description="All donors are told anew this often, for readers that cannot ask; 0, only when one asks.",
    )
