"""Every reason and fault by name: where it arises, and what to do. `python -m tests.reasons` makes the docs' tables."""

from __future__ import annotations

from enum import Enum


class Scope(str, Enum):
    """Where a reason arises."""

    ENGINE = "engine"  # TensorRT-LLM or the embedded engine: nothing is reused
    MODEL = "model"  # the same, for its model
    REQUEST = "request"  # one request is served cold
    PLAN = "plan"  # a plan that was made is not carried out
    ATTACHMENT = "attachment"  # the wrapper cannot attach to TensorRT-LLM
    DECODER = "decoder"  # attached, the wrapper cannot execute plans
    VLLM = "vllm"  # vLLM, or one of its requests, is served without reuse
    SGLANG = "sglang"  # SGLang, or one of its requests, is served without reuse
    FAULT = "fault"  # a call of the engine, or the execution of a plan, failed


# What to do about each reason and fault.
TEXTS: dict[Scope, dict[str, str]] = {}
TEXTS[Scope.ENGINE] = {
    "disabled": "Set SEMBLEND_ENABLED to 1.",
    "policy_off": "Set SEMBLEND_POLICY to another policy than off.",
    "host_offload": "Leave host_cache_size out; the host tier of this product keeps donors in host memory.",
    "attention_window": "Set max_attention_window to [max_seq_len], and max_seq_len; else KV of donors is dropped.",
    "speculative_decoding": "Serve without speculative decoding; KV of rejected tokens may lie in the blocks.",
    "attention_dp": "Switch attention data parallelism off; block ids belong to one rank only.",
    "model_kwargs": "Write what model_kwargs changes into the model's own files.",
    "pipeline_parallel": "Set pipeline_parallel_size to 1; a rank must hold all layers.",
    "context_parallel": "Set context_parallel_size to 1; a rank must hold all tokens.",
    "disaggregated": "Serve without cache_transceiver_config; version 1.1 holds no block for a save with it.",
    "attention_backend": "Set attn_backend to TRTLLM, or to FLASHINFER up to 1.2; the order of others is not known.",
    "configuration": "Correct what the log names: the model's files, or a layer that the policy needs.",
    "model_unreadable": "Look at the error in the log; the model's configuration could not be read.",
    "pool_layout": "Use one KV pool in float32, bfloat16, float16 or fp8 in e4m3, of the model's shape.",
    "layer_groups": "Serve a model whose layers share one pool; the V2 cache manager described several groups.",
    "kv_scales": "For an fp8 cache use the wrapper, and static scales above 0 in every layer; restart after changes.",
    "caches_not_registered": "The request came before the engine handed its caches over; the next ones are served.",
    "metadata_version": "Install one version of this package on all ranks; they would decide differently.",
    "ranks_unknown": "Serve with torch.distributed or MPI; else ranks cannot tell one another what failed.",
}
TEXTS[Scope.MODEL] = {
    "unknown_model_type": "Serve a model type that is known to be movable; the attention of this one may differ.",
    "unknown_architecture": "Serve a known architecture without code of its own; the attention of this one may differ.",
    "mla": "Serve latent attention of DeepSeek-V3's form; what the rows of another form hold is not known.",
    "multimodal": "Serve a text model and text requests; Gemma 3 and Llama 4 run in vLLM with --language-model-only.",
    "geometry": "The heads are no grouped attention, or latent rows have no rank or turn an odd number of channels.",
    "attention_layout": "The attention of some layers is neither full nor a known window or chunk, or is biased, "
    "capped, sparse or in both directions. Llama 4 with chunks is served in vLLM alone.",
    "sliding_window": "A window in all layers, of an unknown type or in TensorRT-LLM 1.1 drops KV of a donor.",
    "window_below_block": "Use blocks of the cache that are no longer than the window.",
    "rope_dynamic": "Dynamic RoPE depends on the length of the text; serve a model without it.",
    "rope_longrope": "Longrope depends on the length of the text; serve a model without it.",
    "rope_multimodal": "Multimodal RoPE has positions of three numbers; serve a model without it.",
    "rope_partial": "The model's code does not define the partial rotation that its configuration asks for.",
    "rope_per_layer": "RoPE differs from layer to layer in an unknown way; a key would move by another rotation.",
    "rope_unknown": "RoPE is of another type or size, or this Transformers does not read its form. For YaRN without "
    "truncation in TensorRT-LLM use policy verified or exact, or vLLM.",
    "kv_quantized": "Serve the checkpoint in vLLM, or in TensorRT-LLM with the wrapper; others do not tell KV scales.",
}
TEXTS[Scope.REQUEST] = {
    "id_in_use": "An earlier request with this id is still being saved; send a new id.",
    "dummy_request": "The engine's own warm-up or padding request means nothing.",
    "generation_only": "The prefill ran elsewhere; no KV of it is here to save.",
    "beam_search": "Ask with one beam; the connector sees the first one only.",
    "context_logits": "Ask without context logits; tokens that are not computed have none.",
    "salt_unknown": "Use an engine that tells the cache salt; it says who may share KV.",
    "salt_invalid": "Send a salt of the type and size that the engine's version has.",
    "invalid_tokens": "Send token ids of the vocabulary; equal placeholders are not equal content.",
    "cold_run": "A cold run (semblend.cold) was asked for, to compare an answer with it.",
    "lookup_timeout": "SEMBLEND_LOOKUP_DEADLINE_MS ended the look-up; what was chosen by then is reused.",
    "lookup_bound": "A bound on the look-up's work left places uncompared; what was found is reused.",
    "internal_error": "Look at the error in the log; the look-up failed.",
    "short_prompt": "The prompt is shorter than SEMBLEND_MIN_SPAN.",
    "prefix_covers_prompt": "The engine's own prefix leaves less than a span.",
    "no_donor_match": "No donor has a run of the prompt's tokens.",
    "chunk_edge": "The model's chunks cut each run into pieces that are shorter than a span.",
    "donor_unavailable": "Donors went between search and lease; give the tiers more room where this is frequent.",
    "donor_on_disk": "The best donors are on disk alone; they are fetched for the next request.",
    "low_reuse": "A plan would reuse less than SEMBLEND_MIN_REUSE_RATIO.",
    "does_not_pay": "Moved KV would save less of the prompt's time than SEMBLEND_MIN_SAVING; exact KV is still used.",
    "hole_needs_wrapper": "Use the wrapper; a stock engine skips tokens from the left only.",
    "strict_prefix_boundary": "SEMBLEND_STRICT_PREFIX_BOUNDARY allows no run with a hole before it.",
    "not_exact": "Runs from other positions were found; the policy, the profile or semblend.exact_only forbids them.",
    "no_profile": "Set SEMBLEND_PROFILE to a calibrated reuse profile; nothing else says what is safe.",
    "profile_mismatch": "Calibrate for this model and engine; the log says once what differs from the profile.",
    "profile_check_layer": "Calibrate again; the profile's check lies below all layers with full attention.",
    "profile_unreadable": "Mend the file that SEMBLEND_PROFILE names; the log says why it cannot be read.",
    "profile_writable": "Take the profile from other users, as chmod go-w or chown do; the log names the path.",
    "profile_evidence": "Calibrate again; the profile was edited, or lacks evidence for its very terms.",
    "bound_broken": "Calibrate on this traffic: spot checks found the profile's promise broken (receipts.md).",
    "no_bound": "Raise SEMBLEND_MAX_KL or SEMBLEND_RISK, or calibrate on more prompts; within both, no bound of the "
    "profile lets moved text be reused.",
    "check_needs_wrapper": "Use the wrapper; a stock engine would not run the check that the policy needs.",
    "head_needs_wrapper": "Use the wrapper; a stock engine would not compute the heads that policy epic needs.",
    "boundary_needs_wrapper": "Use the wrapper; a stock engine would not compute policy boundary's layers.",
    "no_publication_guard": "Approximate KV could enter the engine's prefix cache; the log says why no guard is there.",
}
TEXTS[Scope.PLAN] = {
    "not_honoured": "The engine took nothing of the offer and computes all of it; switch block reuse on.",
    "forward_failed": "A forward failed and the engine lives on; nothing of its requests is kept.",
    "target_blocks": "The blocks do not fit the plan, or were exchanged; the wrapper computes everything.",
    "load_failed": "Donors' KV could not be placed on some rank. The wrapper computes everything and drops the donors; "
    "a stock engine raises, since it skips those tokens in any case.",
    "risk_above_bound": "The sample deviates by more than the bound's levels allow, and everything is computed. Raise "
    "SEMBLEND_MAX_KL or SEMBLEND_RISK, or calibrate on such prompts.",
    "deviation": "The check found more than the profile allows; the span or the tokens are computed in all layers.",
}
TEXTS[Scope.ATTACHMENT] = {
    "caches_refused": "Remove what the first two tables name; the caches were refused for it.",
    "executor_unknown": "Use a known version; the executor is not among the callers.",
    "probe_failed": "Look at the error in the log; the engine's parts could not be read.",
    "cache_manager_unknown": "Use the V1 or V2 cache manager; another one could publish approximate KV.",
    "publication_unknown": "Use a known version; the cache manager publishes in another way.",
    "kv_lending": "Serve without lending of KV blocks; what others read of them is not known yet.",
    "conversation_manager": "Switch conversations of the V2 cache manager off; it could publish approximate KV.",
    "ranks_unknown": "Serve with torch.distributed or MPI; ranks would publish different prefixes.",
}
TEXTS[Scope.DECODER] = {
    "settings_unknown": "Use a known version; settings that must be off cannot be read.",
    "compiled_prefill": "Switch torch_compile_config off; Python between the layers does not run.",
    "prefill_graphs": "Set prefill_cuda_graph_backend to disabled; Python between the layers does not run in a replay.",
    "lora": "Merge the adapter into the weights; the engine lays adapters out for its own rows, and a plan has others.",
    "sparse_attention": "Switch sparse attention off; other tokens are attended to.",
    "attention_backend": "Set attn_backend to TRTLLM; pages of another one are laid out in another way.",
    "kv_cache_dtype": "Leave the cache in the model's dtype; rows in fp8 would have to be rounded as the engine does.",
    "disaggregated": "Serve without cache_transceiver_config; prefill and decode must run in one engine.",
    "prefix_reservations": "Switch reservations of prefixes off; how they are asked for is not known yet.",
    "engine_layout": "Use a known version; whether the engine replays graphs cannot be seen.",
    "model_layout": "Serve a model whose decoder and layers are laid out as known.",
    "model_patched": "Remove the package that replaced a forward; one of both would be lost.",
    "layer_offsets": "Use a known version; layers lie in the pool in another order.",
    "quantized_attention": "Serve a model without quantised attention outputs; their scales are not known.",
    "attention_chunks": "Serve a model without attention in chunks; tokens of other chunks are not attended to.",
    "rope_unknown": "Serve YaRN without truncation in vLLM; TensorRT-LLM truncates, and keys would move otherwise.",
    "attention_scaling": "Serve a model without gated attention, and with one scale a layer.",
    "rope_fused": "Serve a model whose fused rotation does not scale cos and sin.",
    "model_call": "The model is called in an unknown way; the decoder is given back.",
    "layer_call": "A layer is called in an unknown way; the decoder is given back.",
    "attention_call": "The attention is called in an unknown way; the decoder is given back.",
}
TEXTS[Scope.VLLM] = {
    "settings_invalid": "Correct the setting that the log names at the engine's start.",
    "vllm_version": "Install vLLM 0.28 or newer, a release with its number.",
    "other_connector": "Name this connector alone: without MultiConnector and without vLLM's own KV offloading.",
    "encoder_connector": "Start without --ec-transfer-config.",
    "kv_role": "Set kv_role to kv_both: this engine both keeps donors and reads them.",
    "load_failure_policy": "Set kv_load_failure_policy to recompute, so that a failed load costs time and no request.",
    "tensor_parallel": "Set --tensor-parallel-size to a whole number of ranks.",
    "pipeline_parallel": "Set --pipeline-parallel-size to 1 and --tensor-parallel-size to the number of cards: a plan "
    "runs through all layers at once, and a rank of a pipeline has some of them.",
    "data_parallel": "Set --data-parallel-size to 1 and run several engines behind a gateway.",
    "context_parallel": "Set both context parallel sizes to 1.",
    # The halves of one rank meet in one process; vLLM on a CPU replaces uni by mp.
    "executor": "Set --distributed-executor-backend to uni, with tensor parallelism to mp, and on a CPU "
    "VLLM_ENABLE_V1_MULTIPROCESSING to 0.",
    "ubatching": "Start without --enable-dbo and with --ubatch-size 0.",
    "pooling": "Serve a model that generates text; requests for embeddings or scores reuse nothing.",
    "multimodal": "Serve a text model, or --language-model-only; images are not among the tokens compared.",
    "encoder_decoder": "Serve a decoder-only model.",
    "hybrid_model": "Serve a model all of whose layers are attention; states of other layers cannot be moved.",
    "diffusion": "Serve a model that generates from left to right.",
    "non_causal": "Set use_non_causal of the attention config to false.",
    "attention_backend": "Set --attention-backend to FLASH_ATTN, TRITON_ATTN or, for latent attention, FLASH_ATTN_MLA "
    "or TRITON_MLA, and leave its mla_prefill_backend unset or at FLASH_ATTN; other backends were not tried.",
    "sliding_window": "Serve a model with full attention in some layers at least, without --disable-sliding-window.",
    "prompt_embeds": "Start without --enable-prompt-embeds and send token ids; embeddings cannot be compared.",
    "routed_experts": "Start without --enable-return-routed-experts; reused tokens are routed to none.",
    "model_kwargs": "Write what hf_overrides, hf_config_path and the like change into the model's own files.",
    "speculative_decoding": "Set the method of --speculative-config to ngram or suffix, or start without it: "
    "the layers of a drafter have no donor's KV.",
    "lora": "Serve adapters by vLLM's own LoRA manager, or merge the adapter into the weights.",
    "weight_transfer": "Start without --weight-transfer-config, which was not tried; `reload_weights` is followed.",
    "sleep_mode": "Start without --enable-sleep-mode; it would discard what we keep on the card with vLLM's caches.",
    "sequence_parallel": "Set enable_sp of the compilation's pass config to false.",
    "full_cuda_graphs": "Set cudagraph_mode to FULL_AND_PIECEWISE, PIECEWISE or NONE; full prefill graphs run no plan.",
    "kv_cache_dtype": "Leave --kv-cache-dtype at auto, or set it to fp8_e4m3.",
    "kv_scales": "Serve fp8 with static scales above 0 for K and V: one a layer, or with FLASH_ATTN one a head.",
    "kv_sharing_fast_prefill": "Start without --kv-sharing-fast-prefill.",
    "cache_groups": "Set --disable-hybrid-kv-cache-manager, so that all layers keep all tokens in one KV cache group.",
    "cache_spec": "Serve a model with plain full or latent attention; another form of cache cannot be moved.",
    "model_runner": "Serve with vLLM's V1 or V2 model runner; another one's forward is not known.",
    "layer_call": "Serve a model whose layers vLLM calls as Llama's, Granite's or those of Transformers.",
    "recovery": "Serve with vLLM's own scheduler; another one may not compute again what could not be loaded.",
    "prompt_logprobs": "Ask without prompt_logprobs: reused tokens have no logits.",
    "skip_reading_prefix_cache": "Ask without skip_reading_prefix_cache, which asks for a prompt computed in full.",
    "streamed_prompt": "Send the prompt as a whole; one that goes on later is computed.",
    "resumed_with_output": "Give the cache more room: a request preempted while it decoded is computed again.",
    "prompt_ids_missing": "Send a prompt with at least one token.",
}
TEXTS[Scope.SGLANG] = {
    "settings_invalid": TEXTS[Scope.VLLM]["settings_invalid"],
    "sglang_version": "Install SGLang 0.5.23; the seams of another version may differ.",
    "radix_disabled": "Start without --disable-radix-cache.",
    "tensor_parallel": "Set --tp-size to 1.",
    "pipeline_parallel": "Set --pp-size to 1.",
    "data_parallel": "Set --dp-size and --nnodes to 1, and run several servers behind a gateway.",
    "context_parallel": "Set --attn-cp-size and --dcp-size to 1.",
    "hierarchical_cache": "Start without HiCache, LMCache, FlexKV and cache linkers; SEMBLEND_HOST_BYTES keeps donors.",
    "disaggregated": "Serve prefill and decode in one server: --disaggregation-mode null.",
    "speculative_decoding": "Start without --speculative-algorithm.",
    "lora": "Start without --enable-lora, with the adapter merged into the weights.",
    "sessions": "Start without streaming and radix sessions, and ask without one.",
    "pooling": "Serve a model that generates text.",
    "multimodal": "Serve a text model, and send text; images are not among the tokens compared.",
    "kv_cache_dtype": "Leave --kv-cache-dtype at auto.",
    "quantized_attention": "Start without --prefill-kv-cache-dequant-dtype.",
    "model_kwargs": "Write what --json-model-override-args changes into the model's own files.",
    "diffusion": "Serve a model that generates from left to right.",
    "split_prefill": "Start without --enable-pdmux and without overlap of two batches or of parts of one.",
    "memory_layout": "Start with the plain layout of KV: without page-major or unified memory, sharding, the memory "
    "saver and HiSparse.",
    "compiled_prefill": "Start without --enable-torch-compile; Python between the layers does not run.",
    "stripped_answers": "Start without --strip-thinking-cache.",
    "unknown_architecture": "Serve a model of Llama, Qwen2 or Qwen3; others were not tried in SGLang.",
    "pool_layout": "Serve a model with plain K and V, in SGLang's default order of slots.",
    "sliding_window": "Serve a model with full attention in all layers.",
    "attention_layout": "Serve a model with causal attention, without caps, chunks or temperatures.",
    "kv_scales": "Serve a model without scales of its KV cache.",
    "attention_call": "An attention is called in an unknown way; serve Llama, Qwen2 or Qwen3.",
    "prompt_logprobs": "Ask without log-probabilities of the prompt: reused tokens have no logits.",
    "prompt_embeds": "Send token ids; embeddings cannot be compared.",
    "beam_search": "Ask with one beam.",
    "resumed_with_output": "Give the cache more room: a request retracted while it decoded is computed again.",
}
TEXTS[Scope.FAULT] = {
    "wait_for_initialization": "What look-ups need could not be built; the first query tries again.",
    "get_num_new_matched_tokens": "The query for matched tokens failed; 0 tokens were answered.",
    "update_state_after_alloc": "The call with the request's blocks failed; the load of its plan fails too.",
    "update_state_after_alloc_by_layer_group": "The same, where layers have groups.",
    "build_connector_meta": "An iteration's metadata could not be made; its plans are sent, and it leaves no donors.",
    "request_finished": "The end of a request could not be handled; it leaves no donor, leases and room go back.",
    "request_finished_by_layer_group": "The same, where layers have groups.",
    "request_data": "What the engine says of a scheduled request cannot be true; the request leaves no donor.",
    "saved_news": "The events of ended saves could not be taken; the next call reads on.",
    "metadata": "Metadata is of another version; its plans raise, since what was promised cannot be placed.",
    "start_load_kv": "Donors could not be placed; the step computes what they were to hold.",
    "wait_for_save": "vLLM: the end of a step could not be noted; the step's donors are not kept.",
    "get_finished": "vLLM: the end of saves could not be noted; blocks that were to be saved stay held.",
    "step_unreadable": "vLLM and SGLang: a step could not be read; its requests begin again, and reuse ends.",
    "reset_cache": "vLLM: donors could not be forgotten; vLLM hears that its reset has failed.",
    "hook": "vLLM: the model or its runner is laid out in an unknown way; it is given back, and nothing is reused.",
    "self_check": "The first prompt comes out otherwise than the engine's own; the model is given back.",
    "planned_forward": "A plan could not be executed; all that was promised is computed, and nothing is reused from "
    "then on.",
    "whole_graph": "vLLM: planned rows could not be captured or replayed as one CUDA graph; vLLM's own graphs run "
    "them from then on.",
    "plan_not_executed": "A forward ran without its plans; in TensorRT-LLM their requests fail, vLLM and SGLang "
    "begin them again. Nothing is reused from then on.",
}
FAULTS = frozenset(TEXTS[Scope.FAULT])
# What declines reuse or cuts it short.
REASONS = frozenset(name for scope, texts in TEXTS.items() if scope is not Scope.FAULT for name in texts)
# The label of every other reason: labels of metrics stay few.
OTHER_REASON = "other"


def counted_as(reason: str) -> str:
    """Return the metrics' label for a reason; after some faults nothing is reused, so a fault can be one too."""
    return reason if reason in REASONS or reason in FAULTS else OTHER_REASON


def advice(name: str, *scopes: Scope) -> str:
    """Return what to do about a reason, from the first of `scopes`, then of all, that has it; empty if unknown."""
    return next((TEXTS[scope][name] for scope in (*scopes, *Scope) if name in TEXTS[scope]), "")
