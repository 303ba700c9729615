"""A model's facts, its refusals, and whether the settings and their reuse profile fit it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kernels.layout import MOVABLE_DTYPES, SUPPORTED_DTYPES, KvGeometry
from semblend_trt.connector.chunked_attention import LLAMA4
from semblend_trt.connector.eligibility import WRAPPER_MODULE, facts_in_engine, rotates_otherwise, tells_kv_scales
from semblend_trt.connector.engine_namespace import namespace_for
from semblend_trt.connector.model_facts import ModelFacts, model_facts, rope_rotation
from semblend_trt.connector.model_files import is_local
from semblend_trt.doctor.finding import Area
from semblend_trt.errors import ConfigurationError, ProfileError, UnsupportedModelError
from semblend_trt.namespace import CacheNamespace, is_unknown
from semblend_trt.policy import ReusePolicy, terms_of
from semblend_trt.reuse_profile import ReuseProfile
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding

AUTO = "auto"
_LEFT_OPEN = "dtypes other than the KV cache's, and the parallel layout, are compared when the engine starts"
_LAYOUT_OPEN = "the order of the caches in memory is compared when the engine starts"
_model, _profile = Area("model"), Area("profile")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is not refused. `dtype` is that of its KV, None where it is not known. `arguments`: those of another
    engine than TensorRT-LLM, one that executes plans."""

    name: str
    facts: ModelFacts
    dtype: torch.dtype | None
    arguments: Any = None

    def geometry(self, tensor_parallel_size: int = 1) -> KvGeometry:
        """One rank's sizes, in blocks of one token."""
        kv_heads = max(1, self.facts.kv_heads // tensor_parallel_size)
        return KvGeometry(self.facts.num_layers, kv_heads, self.facts.head_dim, 1, self.facts.kv_factor)

    def namespace(self, settings: Settings, **arguments: Any) -> CacheNamespace:
        """The namespace of an engine that serves the model with these `arguments`; the others count as unknown."""
        llm_args = SimpleNamespace(model=self.name, **arguments)
        return namespace_for(llm_args, self.facts, settings, 1, "unknown" if self.dtype is None else self.dtype)


def known_model(name: str, kv_dtype: str, arguments: Any = None, llm_args: Any = None) -> KnownModel | Finding:
    """Reads the model, whose KV is of `kv_dtype`, a dtype's name or "auto" for that of `arguments`, or the model's own.

    `arguments` are what was read of another engine's, `llm_args` TensorRT-LLM's. What an engine would refuse comes back
    as a finding with its reason.
    """
    is_scaled = tells_kv_scales(arguments) or tells_kv_scales(llm_args)
    if kv_dtype == AUTO and arguments is not None and arguments.dtype is not None:
        kv_dtype = arguments.kv_dtype.removeprefix("torch.")
    if kv_dtype == "fp8" and not is_scaled:
        return _model.refused("kv_scales", f"a KV cache of fp8 is taken in vLLM, and elsewhere by {WRAPPER_MODULE}")
    kv_dtype = "float8_e4m3fn" if kv_dtype == "fp8" else kv_dtype
    try:
        facts = facts_in_engine(model_facts(name, None, is_scaled), arguments)
    except UnsupportedModelError as error:
        return _model.refused(error.reason, str(error))
    except ConfigurationError as error:
        return _model.refused("configuration", str(error))
    except Exception as error:
        return _model.refused("model_unreadable", f"its configuration cannot be read: {error!r}")
    dtype = _own_dtype(name) if kv_dtype == AUTO else getattr(torch, kv_dtype, None)
    if dtype not in (MOVABLE_DTYPES if is_scaled else SUPPORTED_DTYPES) and (kv_dtype != AUTO or dtype is not None):
        name = kv_dtype if dtype is None else str(dtype).removeprefix("torch.")
        return _model.refused("pool_layout", f"a KV cache of {name} is not taken; float32, bfloat16 and float16 are")
    return KnownModel(name, facts, dtype, arguments)


def model(known: KnownModel, settings: Settings | None) -> Iterator[Finding]:
    """The geometry, rotation and size of its KV, and settings that do not fit it."""
    yield from _described(known.facts)
    if known.dtype is None:
        yield _model.note("its configuration names no dtype; give that of the KV cache with --kv-dtype")
    elif settings is not None:
        yield _size(known, known.dtype, settings)
    if settings is not None:
        yield from _policy(known, settings)
        yield from _identity(known, settings)


def profile(settings: Settings, known: KnownModel | None) -> Iterator[Finding]:
    """What the profile allows, and whether it fits `known` as far as can be told without the engine."""
    if settings.policy is not ReusePolicy.VERIFIED:
        if settings.profile_path is not None:
            yield _profile.note(f"SEMBLEND_PROFILE is set, but policy {settings.policy.value} uses no profile")
        return
    if settings.profile_path is None:
        yield _profile.note(
            "SEMBLEND_PROFILE is not set: only identical text from position 0 is reused; make a profile with "
            "`python -m validation calibrate --model ...`",
            "no_profile",
        )
        return
    try:
        held = ReuseProfile.read(settings.profile_path)
        if (lacking := held.evidence_refusal()) is not None and not settings.profile_trial:
            raise ProfileError(lacking, "profile_evidence")
    except ProfileError as error:
        yield _profile.refused(error.reason, str(error))
        return
    if settings.profile_trial:
        yield _profile.note("SEMBLEND_PROFILE_TRIAL is on: it is used without its evidence")
    yield _profile.ok(_allowed(held), policy=held.policy, boundary=held.boundary, date=held.date)
    if known is None:
        yield _profile.note(f"made for model {held.namespace['model']}; --model compares it with one")
        return
    differences = _differences(held, settings, known)
    too_low = held.check_refusal(known.facts.lowest_check_layer)
    if too_low is not None:
        yield _profile.refused("profile_check_layer", too_low)
    elif differences:
        yield _profile.refused("profile_mismatch", " ".join(differences), differences=differences)
    else:
        is_open = _LEFT_OPEN if known.arguments is None else _LAYOUT_OPEN
        yield _profile.ok(f"it can hold for {known.name} in {' or '.join(held.engines)}; {is_open}")


def _described(facts: ModelFacts) -> Iterator[Finding]:
    kept = "one latent row" if facts.kv_factor == 1 else f"{facts.kv_heads} KV heads"
    yield _model.ok(
        f"{facts.model_type}: {facts.num_layers} layers, {facts.num_heads} query heads and {kept} of {facts.head_dim} "
        f"channels, {facts.max_positions} positions",
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        max_positions=facts.max_positions,
    )
    rotation, parameters = facts.rotation, dict(facts.rope_parameters)
    yield _model.ok(
        f"RoPE of type {parameters.get('rope_type', 'default')}, theta {parameters['rope_theta']:g}, on "
        f"{rotation.rotary_dim} of {facts.head_dim} channels{_exceptions(facts)}: its KV can be moved to other "
        "positions",
        rotary_dim=rotation.rotary_dim,
        rope_parameters=parameters,
    )
    if windows := [each for each in facts.windows if each is not None]:
        yield _model.ok(
            f"{len(windows)} of {facts.num_layers} layers see {windows[0]} tokens; checks lie in layer "
            f"{facts.lowest_check_layer} or above",
            windows=list(facts.windows),
        )
        yield _model.note("in TensorRT-LLM it is served from 1.2 on, with max_attention_window: [max_seq_len]")
    if facts.chunk is not None:
        yield _model.ok(
            f"{facts.num_layers - facts.chunks.count(None)} of {facts.num_layers} layers see a chunk of {facts.chunk} "
            f"tokens; a run is moved where it lies in one, and checks lie in layer {facts.lowest_check_layer} or above",
            chunks=list(facts.chunks),
        )
    if facts.model_type in LLAMA4:
        yield _model.note("in TensorRT-LLM it is refused: no plan was tried over its chunks there", "attention_layout")
    if rotates_otherwise(facts):
        yield _model.note(
            "in TensorRT-LLM, which truncates yarn, only text that is identical from position 0 is reused",
            "rope_unknown",
        )
    if facts.quantization is not None:
        yield _model.ok(f"quantised weights ({facts.quantization.partition(':')[0]}), KV as it is")


def _exceptions(facts: ModelFacts) -> str:
    """How many layers rotate otherwise, or not at all."""
    whole = {**facts.rope_parameters, "partial_rotary_factor": 1.0}
    usual = rope_rotation(whole, facts.rotation.rotary_dim).inverse_frequencies
    rotations = [facts.rotation.of_layer(layer) for layer in range(facts.num_layers)]
    none = sum(each.is_still for each in rotations)
    other = sum(each.inverse_frequencies != usual for each in rotations) - none
    told = ((none, "none"), (other, "another one"))
    return "".join(f", {what} in {count} of {facts.num_layers} layers" for count, what in told if count)


def _size(known: KnownModel, dtype: torch.dtype, settings: Settings) -> Finding:
    per_token = known.geometry().bytes_per_token(dtype)
    name = str(dtype).removeprefix("torch.")
    tokens = {
        tier: size // per_token
        for tier, size in (
            ("device", settings.device_bytes),
            ("host", settings.host_bytes),
            ("disk", settings.disk_bytes),
        )
    }
    held = ", ".join(f"{count} tokens on the {tier}" for tier, count in tokens.items() if count)
    text = f"{per_token} bytes of KV a token in {name}, on one rank; room for donors: {held or 'none'}"
    if tokens["host"] < settings.min_donor_tokens and tokens["device"] < settings.min_donor_tokens:
        return _model.failed(f"{text}, too little for any; raise SEMBLEND_HOST_BYTES")
    return _model.ok(text, bytes_per_token=per_token, tokens=tokens)


def _policy(known: KnownModel, settings: Settings) -> Iterator[Finding]:
    """What the policy means for every request."""
    try:
        terms = terms_of(settings.policy, settings, known.facts.num_layers, known.facts.lowest_check_layer)
    except ConfigurationError as error:
        yield _model.refused("configuration", str(error))
        return
    reason = "check_needs_wrapper" if settings.policy is ReusePolicy.VERIFIED else terms and terms.wrapper_reason
    if reason and known.arguments is None:
        yield _model.note(
            f"policy {settings.policy.value} needs the wrapper; a stock engine reuses identical text from position 0",
            reason,
        )


def _identity(known: KnownModel, settings: Settings) -> Iterator[Finding]:
    """Parts of the namespace that the model's files do not tell."""
    namespace = known.namespace(settings)
    for part, value, variable in (
        ("weights", namespace.model_revision, "SEMBLEND_MODEL_REVISION"),
        ("tokenizer files", namespace.tokenizer_revision, "SEMBLEND_TOKENIZER_REVISION"),
    ):
        if is_unknown(value):
            yield _model.note(
                f"its {part} are not on this machine, or cannot be read: where they are not on the engine's either, "
                f"no reuse profile holds and donors on disk are not found again; {variable} can name them"
            )


def _own_dtype(name: str) -> torch.dtype | None:
    config, _ = imported("PretrainedConfig").get_config_dict(name, local_files_only=is_local(name))
    # Transformers 5 writes it as `dtype`, older ones as `torch_dtype`.
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _cache_dtype(held: ReuseProfile) -> str:
    """Returns the profile's cache dtype as an engine can have it: a name, and "+" with a digest of scales at most."""
    return "+".join(str(held.namespace["cache_dtype"]).split("+")[:2])


def _differences(held: ReuseProfile, settings: Settings, model: KnownModel) -> list[str]:
    """Why the profile holds for no engine of the model; what depends on the engine is left open."""
    if (own := model.arguments) is not None:
        kv_dtype = "unknown" if model.dtype is None else model.dtype
        namespace = namespace_for(own, model.facts, settings, 1, kv_dtype)
        layout = next((each for each in held.engines if each.startswith(f"{own.engine}/")), own.engine)
        # The scales of an fp8 cache are known once the model is loaded.
        named = _cache_dtype(held)
        cache_dtype = named if named.partition("+")[0] == namespace.cache_dtype else namespace.cache_dtype
        namespace = replace(namespace, backend_cache_layout=layout, cache_dtype=cache_dtype)
        return held.differences(namespace, model.geometry())
    made_for: dict[str, Any] = held.namespace
    ranks = made_for["tensor_parallel"]
    namespace = model.namespace(
        settings,
        dtype=made_for["compute_dtype"],
        kv_cache_config=SimpleNamespace(dtype=_cache_dtype(held)),
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
    text = f"made on {held.date}: policy {held.policy}"
    if held.check is not None:
        text += f", tokens that deviate by more than {held.check.threshold:g} at layer {held.check.layer} are computed"
        if held.check.window_threshold is not None:
            length, bound = held.check.window_tokens, held.check.window_threshold
            text += f", and {length} in a row that do by more than {bound:g} on average"
    return text + (f", the lowest {held.boundary} layers are computed for all" if held.boundary else "")
