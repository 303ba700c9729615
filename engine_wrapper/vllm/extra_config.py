"""Settings from `kv_connector_extra_config`, with the keys that users of semblend-vllm-connector have."""

from __future__ import annotations

import difflib
import json
import logging
from typing import TYPE_CHECKING, Any

from semblend_trt.config import Settings, variables_of
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

# Keys of semblend-vllm-connector with the same meaning as a setting of another name.
_RENAMED = {"min_semantic_span": "min_span_tokens", "kv_storage_path": "disk_path"}
# Its modes that are settings here. The others served spans unchecked.
_MODES = {"discovery_only": ("discovery_only", "1"), "exact_prefix": ("policy", "exact")}
# Its other keys, each with what replaces them.
_REPLACED = {
    "mode allow_non_identical_request_only": "policy decides what is reused, and verified checks every span",
    "register_donors capture_policy capture_sample_rate capture_hint_key capture_served_requests": "every request that "
    "ends with min_donor_tokens becomes a donor",
    "kv_storage_backend kv_memory_max_donors": "host_bytes and disk_bytes size the tiers, and 0 leaves one out",
    "min_prompt_tokens min_boundary_tokens min_mid_prefill_segment": "min_span_tokens",
    "embedder_type enable_prompt_text": "embedder",
    "capture_async_copy capture_write_queue_depth": "staging_bytes",
    "lookup_precheck lookup_top_k max_materialized_tokens": "lookup_deadline_ms",
    "log_decisions": "audit_path and metrics",
    "provider provider_module provider_class model_id chunk_size multi_donor_spans stage_hint_key min_query_text_chars "
    "evict_filled_blocks_from_prefix_cache skip_when_exact_prefix_ratio_at_least boundary_sliced_query_text "
    "capture_write_close_timeout_s donor_registration_retry_steps": "nothing is needed any more",
}
_REPLACEMENT_OF = {key: by for keys, by in _REPLACED.items() for key in keys.split()}


def settings_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `extra` gives, by their fields; they win over the environment.

    A key is a variable's name with or without its prefix, or the setting's field, in any case; a value may be of any
    JSON type and means what its text would mean in the variable; null and "" count as unset. Replaced keys are named
    in one warning, unknown ones in another. Raises ConfigurationError where two keys give one setting two values.
    """
    named = _keys()
    found: dict[str, Any] = {}
    old: dict[str, Any] = {}
    replaced: dict[str, str] = {}
    unknown: list[str] = []
    for given, value in extra.items():
        key, text = str(given).lower(), _text(value)
        if text is None:
            continue
        if key in named:
            field = named[key]
            if found.setdefault(field, text) != text:
                raise ConfigurationError(f"kv_connector_extra_config gives {field} two values; keep one of them")
        elif key in _RENAMED:
            old[_RENAMED[key]] = text
        elif key == "mode" and text in _MODES:
            field, text = _MODES[text]
            old[field] = text
        elif key in _REPLACEMENT_OF:
            replaced[key] = _REPLACEMENT_OF[key]
        else:
            unknown.append(_told(str(given), named))
    if "disk_path" in old and "disk_bytes" not in found:
        replaced["kv_storage_path"] = "disk_path with disk_bytes, without which nothing is written"
    if replaced:
        told = "; ".join(f"{key}: {by}" for key, by in replaced.items())
        logger.warning("kv_connector_extra_config has keys that are not read any more: %s", told)
    if unknown:
        logger.warning("kv_connector_extra_config has keys that no setting has: %s", ", ".join(unknown))
    return {**old, **found}


def settings_off() -> dict[str, Any]:
    """Settings for an engine that reuses nothing, none of them read from the environment."""
    return {name: field.default for name, field in Settings.model_fields.items()}


def _keys() -> dict[str, str]:
    """The field of each name that a setting may be given under."""
    keys = {}
    for field in Settings.model_fields:
        _, variable, *_ = names = variables_of(field)
        for name in (field, f"semblend_{field}", variable.removeprefix("SEMBLEND_"), *names):
            keys[name.lower()] = field
    return keys


def _text(value: object) -> Any:
    """A value as a variable would have it; None for one that counts as unset. Lists and objects stay as they are."""
    if isinstance(value, str):
        return value.strip() or None
    return json.dumps(value) if isinstance(value, (bool, int, float)) else value


def _told(key: str, named: dict[str, str]) -> str:
    close = difflib.get_close_matches(key.lower(), named, n=1, cutoff=0.8)
    return repr(key[:64]) + (f" (did you mean {close[0]}?)" if close else "")
