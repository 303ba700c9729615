"""Settings of how donors are found and which runs of theirs make a plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from semblend_trt.semantic.embedder import EmbedderKind
from semblend_trt.settings.environment import SettingsGroup, Variable


class DiscoverySettings(SettingsGroup):
    min_span_tokens: Annotated[int, Variable("MIN_SPAN", "SEMBLEND_TRTLLM_MIN_MATCH_LENGTH")] = Field(
        64,
        ge=1,
        le=1 << 20,
        description="Shortest token-identical run that is reused; runs below 32 tokens are not looked for.",
    )
    min_reuse_ratio: Annotated[float, Variable("MIN_REUSE_RATIO")] = Field(
        0.5, ge=0.0, le=1.0, description="Least share of the prompt's uncomputed tokens that a plan must reuse."
    )
    discovery_only: Annotated[bool, Variable("DISCOVERY_ONLY")] = Field(
        False, description="Look donors up and report what would be reused, but place nothing."
    )
    fuzzy_chunks: Annotated[bool, Variable("FUZZY_CHUNKS")] = Field(
        False,
        description="Reuse text that a donor holds up to a few tokens: runs shorter than a span count together; "
        "tokens that differ are always computed. Needs the wrapper.",
    )
    fuzzy_margin_tokens: Annotated[int, Variable("FUZZY_MARGIN")] = Field(
        4, ge=0, le=1024, description="Equal tokens behind each difference of a fuzzy chunk that are computed with it."
    )
    strict_prefix_boundary: Annotated[bool, Variable("STRICT_PREFIX_BOUNDARY")] = Field(
        False,
        description="Promise only what goes on without a hole from where the engine's own prefix ends, up to the end "
        "of a block.",
    )
    exact_materialization_only: Annotated[bool, Variable("EXACT_MATERIALIZATION_ONLY")] = Field(
        False,
        description="Place only KV equal to a cold run's; what the policy would reuse beyond it is reported.",
    )
    lookup_deadline_ms: Annotated[float, Variable("LOOKUP_DEADLINE_MS")] = Field(
        5.0,
        ge=0.001,
        le=60_000,
        description="Most processor time that one lookup may take, in milliseconds; one that takes longer is refused "
        "as lookup_timeout, and its request is served cold.",
    )
    embedder: Annotated[EmbedderKind, Variable("EMBEDDER")] = Field(
        EmbedderKind.OFF,
        description="How texts are compared to report the nearest donors of a request, beside serving: not at all, by "
        "hashed words, by word sets, or by a sentence model. What is near is reported, never reused for it. All but "
        "off need the extra semantic.",
    )
    embedder_model: Annotated[str | None, Variable("EMBEDDER_MODEL")] = Field(
        None,
        min_length=1,
        max_length=4096,
        description="Folder or cached hub id of the sentence model; unset, all-MiniLM-L6-v2 as the extra embedder "
        "brings it.",
    )
    min_similarity: Annotated[float, Variable("MIN_SIMILARITY")] = Field(
        0.60, ge=-1.0, le=1.0, description="Least cosine similarity at which a donor is reported as near a request."
    )
