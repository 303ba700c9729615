"""A model's facts, its refusals, and whether the settings and their reuse profile fit it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from kernels.layout import MOVABLE_DTYPES, SUPPORTED_DTYPES
from semblend_trt.config import Settings, terms_of
from semblend_trt.connector.contract import V14
from semblend_trt.connector.eligibility import facts_in_engine, spec_of, trtllm_refusal
from semblend_trt.connector.engine_spec import WRAPPER_MODULE, EngineSpec
from semblend_trt.connector.lookup import namespace_for
from semblend_trt.connector.model_facts import ModelFacts, model_facts
from semblend_trt.doctor import Area, Finding
from semblend_trt.errors import ConfigurationError, ProfileError, UnsupportedModelError
from semblend_trt.model_files import is_local
from semblend_trt.model_tokenizer import imported
from semblend_trt.namespace import CacheNamespace, is_unknown
from semblend_trt.policy import ReusePolicy
from semblend_trt.reasons import advice
from semblend_trt.reuse_profile import ReuseProfile

AUTO = "auto"
_model, _profile = Area("model"), Area("profile")
# What holds as long as a profile is missing.
_UNTIL = "Until then only identical text from position 0 is reused."


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is not refused. `dtype` is its KV's; `arguments` are those of another engine than TensorRT-LLM."""

    name: str
    facts: ModelFacts
    dtype: torch.dtype | None
    arguments: EngineSpec | None = None

    def namespace(self, settings: Settings, **arguments: Any) -> CacheNamespace:
        """Return the namespace of an engine with these `arguments`; the others count as unknown."""
        engine = self.arguments or spec_of(SimpleNamespace(model=self.name, **arguments))
        return namespace_for(engine, self.facts, settings, 1, "unknown" if self.dtype is None else self.dtype)


def findings(
    name: str | None, kv_dtype: str, settings: Settings | None, arguments: EngineSpec | None, llm_args: Any
) -> Iterator[Finding]:
    """Yield what is found of the model of this name and of the settings' reuse profile; see `known_model`."""
    known = None if name is None else known_model(name, kv_dtype, arguments, llm_args)
    if isinstance(known, Finding):
        yield known
        return
    if known is not None:
        yield from model(known, settings)
    if settings is not None:
        yield from profile(settings, known)


def known_model(
    name: str, kv_dtype: str, arguments: EngineSpec | None = None, llm_args: Any = None
) -> KnownModel | Finding:
    """Read the model, or return a finding for what an engine would refuse. With `kv_dtype` "auto" the dtype is that of
    `arguments`, another engine's, or the model's own. `llm_args` are TensorRT-LLM's."""
    is_scaled = any(each is not None and spec_of(each).tells_kv_scales for each in (arguments, llm_args))
    if kv_dtype == AUTO and arguments is not None and arguments.kv_dtype is not None:
        kv_dtype = arguments.kv_dtype
    if kv_dtype == "fp8" and not is_scaled:
        return _model.refused("kv_scales", f"a KV cache of fp8 is taken in vLLM, and elsewhere by {WRAPPER_MODULE}")
    kv_dtype = "float8_e4m3fn" if kv_dtype == "fp8" else kv_dtype
    try:
        facts = model_facts(name, None, is_scaled)
        facts = facts if arguments is None else facts_in_engine(facts, arguments)
    except UnsupportedModelError as error:
        return _model.refused(error.reason, str(error))
    except ConfigurationError as error:
        return _model.refused("configuration", str(error))
    except Exception as error:
        return _model.refused("model_unreadable", f"its configuration cannot be read: {error!r}")
    own = kv_dtype
    if kv_dtype == AUTO:
        config, _ = imported("PretrainedConfig").get_config_dict(name, local_files_only=is_local(name))
        own = str(config.get("dtype") or config.get("torch_dtype"))  # as Transformers 5 and older ones write it
    dtype = getattr(torch, own, None)
    dtype = dtype if isinstance(dtype, torch.dtype) or kv_dtype != AUTO else None
    if dtype not in (MOVABLE_DTYPES if is_scaled else SUPPORTED_DTYPES) and (kv_dtype != AUTO or dtype is not None):
        name = kv_dtype if dtype is None else str(dtype).removeprefix("torch.")
        return _model.refused("pool_layout", f"a KV cache of {name} is not taken; float32, bfloat16 and float16 are")
    return KnownModel(name, facts, dtype, arguments)


def model(known: KnownModel, settings: Settings | None) -> Iterator[Finding]:
    """Yield the geometry, rotation and size of its KV, and settings that do not fit it."""
    facts = known.facts
    kept = "one latent row" if facts.kv_factor == 1 else f"{facts.kv_heads} KV heads"
    yield _model.ok(
        f"{facts.model_type}: {facts.num_layers} layers, {facts.num_heads} query heads and {kept} of {facts.head_dim} "
        f"channels, {facts.max_positions} positions"
    )
    yield _model.ok(
        f"RoPE of type {facts.rope_parameters.get('rope_type', 'default')} on {facts.rotation.kinds[0].rotary_dim} of "
        f"{facts.head_dim} channels: its KV can be moved to other positions"
    )
    for what, sizes in (("a window", facts.windows), ("a chunk", facts.chunks)):
        if seen := [size for size in sizes if size is not None]:
            yield _model.ok(
                f"{len(seen)} of {facts.num_layers} layers see {what} of {seen[0]} tokens; checks lie in layer "
                f"{facts.lowest_check_layer} or above"
            )
    if known.dtype is None:
        yield _model.note("its configuration names no dtype; give that of the KV cache with --kv-dtype")
    if settings is None:
        return
    if known.dtype is not None:
        yield _size(known, known.dtype, settings)
    if known.arguments is None and (refusal := trtllm_refusal(facts, V14, settings.policy)) is not None:
        yield _model.note(f"in TensorRT-LLM it is refused: {refusal}", refusal.reason)
    try:
        terms = terms_of(settings.policy, settings, facts.num_layers, facts.lowest_check_layer)
    except ConfigurationError as error:
        yield _model.refused("configuration", str(error))
    else:
        reason = "check_needs_wrapper" if settings.policy is ReusePolicy.VERIFIED else terms and terms.wrapper_reason
        if reason and known.arguments is None:
            text = f"{advice(reason)} Under policy {settings.policy.value} it reuses identical text from position 0."
            yield _model.note(text, reason)
    namespace = known.namespace(settings)
    for name in ("model_revision", "tokenizer_revision"):
        if is_unknown(getattr(namespace, name)):
            yield _model.note(
                f"its {name.partition('_')[0]} files are not on this machine, or cannot be read: without them no "
                f"profile holds, and donors on disk are not found again; SEMBLEND_{name.upper()} can name them"
            )


def _size(known: KnownModel, dtype: torch.dtype, settings: Settings) -> Finding:
    per_token = known.facts.sizes(1).bytes_per_token(dtype)
    tokens = {tier: getattr(settings, f"{tier}_bytes") // per_token for tier in ("device", "host", "disk")}
    held = ", ".join(f"{count} tokens on the {tier}" for tier, count in tokens.items() if count)
    name = str(dtype).removeprefix("torch.")
    text = f"{per_token} bytes of KV a token in {name}, on one rank; room for donors: {held or 'none'}"
    if max(tokens["host"], tokens["device"]) < settings.min_donor_tokens:
        return _model.failed(f"{text}, too little for any; raise SEMBLEND_HOST_BYTES")
    return _model.ok(text)


def profile(settings: Settings, known: KnownModel | None) -> Iterator[Finding]:
    """Yield what the profile allows, and whether it fits `known`, as far as that is known without the engine."""
    if settings.policy is not ReusePolicy.VERIFIED:
        return
    if settings.profile_path is None:
        yield _profile.note(f"{advice('no_profile')} {_UNTIL}", "no_profile")
        return
    asked = settings.max_kl, settings.risk
    try:
        held = ReuseProfile.read(settings.profile_path)
        if (lacking := held.evidence_refusal(*asked)) is not None and not settings.profile_trial:
            raise ProfileError("profile_evidence", lacking)
    except ProfileError as error:
        yield _profile.refused(error.reason, str(error))
        return
    check = held.check
    bound = f", computes tokens that deviate by more than {check.threshold:g} at layer {check.layer}" if check else ""
    trial = "; SEMBLEND_PROFILE_TRIAL uses it without its evidence" if settings.profile_trial else ""
    yield _profile.ok(f"made on {held.date}: policy {held.policy}{bound}{trial}")
    if settings.max_kl == "unbounded":
        yield _profile.note("SEMBLEND_MAX_KL is unbounded: text from other positions is reused unchecked")
    elif (kept := held.bound_for(*asked)) is not None and kept.levels:
        yield _profile.ok(f"its bound: all but {kept.risk:g} of the answers are within {kept.max_kl:g} nats of cold's")
    elif held.terms is not None and held.terms_for(*asked) is None:
        yield _profile.note(f"{advice('no_bound')} {_UNTIL}", "no_bound")
    elif held.terms is not None:
        yield _profile.note("it states no bound for answers: `python -m validation calibrate` makes one that does")
    if known is None:
        yield _profile.note(f"made for model {held.namespace['model']}; --model compares it with one")
    elif (too_low := held.check_refusal(known.facts.lowest_check_layer)) is not None:
        yield _profile.refused("profile_check_layer", too_low)
    elif differences := _differences(held, settings, known):
        yield _profile.refused("profile_mismatch", " ".join(differences))
    else:
        left = "dtypes other than the KV cache's, and the parallel layout, are"
        left = left if known.arguments is None else "the order of the caches in memory is"
        engines = " or ".join(held.engines)
        yield _profile.ok(f"it can hold for {known.name} in {engines}; {left} compared when the engine starts")


def _differences(held: ReuseProfile, settings: Settings, known: KnownModel) -> list[str]:
    """Return why the profile holds for no engine of the model; what depends on the engine is left open."""
    made_for: dict[str, Any] = held.namespace
    # An engine can have a name and "+" with a digest of scales, which is known once the model is loaded.
    cache_dtype = "+".join(str(made_for["cache_dtype"]).split("+")[:2])
    if (own := known.arguments) is not None:
        namespace = known.namespace(settings)
        layout = next((each for each in held.engines if each.startswith(f"{own.name}/")), own.name)
        is_same = cache_dtype.partition("+")[0] == namespace.cache_dtype
        cache_dtype = cache_dtype if is_same else namespace.cache_dtype
        return held.differences(
            replace(namespace, backend_cache_layout=layout, cache_dtype=cache_dtype), known.facts.sizes(1)
        )
    ranks = made_for["tensor_parallel"]
    namespace = known.namespace(
        settings,
        dtype=made_for["compute_dtype"],
        kv_cache_config=SimpleNamespace(dtype=cache_dtype),
        tensor_parallel_size=ranks["tp_size"],
        pipeline_parallel_size=ranks["pp_size"],
        context_parallel_size=ranks["cp_size"],
    )
    namespace = replace(namespace, backend_cache_layout=held.engines[0])
    if known.dtype is None:
        namespace = replace(namespace, kv_dtype=made_for["kv_dtype"])
    tensor_parallel_size = ranks["tp_size"] if isinstance(ranks["tp_size"], int) else 1
    return held.differences(namespace, known.facts.sizes(tensor_parallel_size))
