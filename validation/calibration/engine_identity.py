"""Which engine it is: the namespace of its KV and its geometry, as its own connector sees them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from engine_wrapper.embedded.sampling import SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import CacheNamespace
from validation.arms import WRAPPER_WITHOUT_PLAN, ArmChoices, arms_of
from validation.audit_log import read_events
from validation.engines import EngineSettings

if TYPE_CHECKING:
    from validation.engines import Engines
    from validation.quality.batches import BatchSettings

_PROBE_TOKENS = 128


def identity_of(engines: Engines, settings: BatchSettings) -> tuple[CacheNamespace, KvGeometry]:
    """Starts an engine, serves one prompt, and reads its audit log: the connector may live in another process.

    Raises ConfigurationError with the reason when the connector refuses the engine, and SemBlendError.
    """
    [arm] = arms_of([WRAPPER_WITHOUT_PLAN], ArmChoices(engines.facts.num_layers, boundary=1))
    asked = EngineSettings(settings.model, 2 * _PROBE_TOKENS, 1 << 20, settings.min_span)
    with tempfile.TemporaryDirectory(prefix="identity-") as folder:
        audit = Path(folder) / "audit.jsonl"
        engine = engines.open(arm, asked, audit)
        try:
            engine.generate([[0] * _PROBE_TOKENS], SamplingParams(max_tokens=1))
        finally:
            engine.shutdown()
        events = {event["event"]: event for event in read_events(audit)}
    compared = events.get("profile_compared")
    if compared is None:
        refusal = events.get("scheduler_initialized", {}).get("refusal")
        raise ConfigurationError(
            f"The connector refuses to serve {settings.model} ({refusal or 'the reason is in the engine log'}), and no "
            "profile can change it."
        )
    return CacheNamespace.from_dict(compared["namespace"]), KvGeometry(**compared["geometry"])
