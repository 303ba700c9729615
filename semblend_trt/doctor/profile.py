"""Whether the reuse profile that SEMBLEND_PROFILE names can be read, and can hold for a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from semblend_trt.doctor.finding import Chapter
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import WINDOW_TOKENS
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ReuseProfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding
    from semblend_trt.doctor.model import KnownModel

_chapter = Chapter("profile")
_LEFT_OPEN = "dtypes other than the KV cache's, and the parallel layout, are compared when the engine starts"


def profile(settings: Settings, model: KnownModel | None) -> Iterator[Finding]:
    """Says what the profile allows, and compares it with `model` as far as that is known without its engine."""
    if settings.policy is not ReusePolicy.VERIFIED:
        if settings.profile_path is not None:
            yield _chapter.note(f"SEMBLEND_PROFILE is set, but policy {settings.policy.value} uses no profile")
        return
    if settings.profile_path is None:
        yield _chapter.note(
            "SEMBLEND_PROFILE is not set: only identical text from position 0 is reused; make a profile with "
            "`python -m validation calibrate --model ...`",
            "no_profile",
        )
        return
    try:
        held = ReuseProfile.read(settings.profile_path)
    except ConfigurationError as error:
        yield _chapter.refused("profile_unreadable", str(error))
        return
    yield _chapter.ok(_allowed(held), policy=held.policy, boundary=held.boundary, date=held.date)
    if model is None:
        yield _chapter.note(f"made for model {held.namespace['model']}; --model compares it with one")
        return
    differences = differences_from(held, settings, model)
    if differences:
        yield _chapter.refused("profile_mismatch", " ".join(differences), differences=differences)
    else:
        yield _chapter.ok(f"it can hold for {model.name} in {' or '.join(held.engines)}; {_LEFT_OPEN}")


def differences_from(held: ReuseProfile, settings: Settings, model: KnownModel) -> list[str]:
    """What keeps the profile from holding for every engine of the model; what depends on the engine is left open."""
    made_for: dict[str, Any] = held.namespace
    ranks = made_for["tensor_parallel"]
    namespace = model.namespace(
        settings,
        dtype=made_for["compute_dtype"],
        kv_cache_config=SimpleNamespace(dtype=made_for["cache_dtype"]),
        tensor_parallel_size=ranks["tp_size"],
        pipeline_parallel_size=ranks["pp_size"],
        context_parallel_size=ranks["cp_size"],
    )
    open_fields: dict[str, Any] = {"backend_cache_layout": held.engines[0]}
    if model.dtype is None:
        open_fields["kv_dtype"] = made_for["kv_dtype"]
    tensor_parallel_size = ranks["tp_size"] if isinstance(ranks["tp_size"], int) else 1
    return held.differences(replace(namespace, **open_fields), model.geometry(tensor_parallel_size))


def _allowed(held: ReuseProfile) -> str:
    told = f"made on {held.date}: policy {held.policy}"
    if held.check is not None:
        told += f", tokens that deviate by more than {held.check.threshold:g} at layer {held.check.layer} are computed"
        if held.check.window_threshold is not None:
            told += f", and {WINDOW_TOKENS} in a row that do by more than {held.check.window_threshold:g} on average"
    return told + (f", the lowest {held.boundary} layers are computed for all" if held.boundary else "")
