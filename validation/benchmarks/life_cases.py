"""The engines that live a random life: every version of the contract, under both cache managers, and every habit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from semblend_trt.connector.contract_versions import contract_version

if TYPE_CHECKING:
    from semblend_trt.connector.contract_versions import ContractVersion


@dataclass(frozen=True, slots=True)
class Case:
    """An engine. With `wrapper` documents are reused wherever they stand, with all tiers; without, identical prompts
    from the start, from host memory. In a `rough` life requests that run together begin alike, saves lag behind the
    iterations, and forwards fail where the version survives that."""

    contract: str
    v2: bool
    overlap: bool
    wrapper: bool = False
    rough: bool = False
    block_reuse: bool = True
    transceiver: bool = False
    attn_backend: Literal["TRTLLM", "FLASHINFER"] = "TRTLLM"

    @property
    def name(self) -> str:
        parts = ("v2" if self.v2 else "v1", "overlap" * self.overlap, "wrapper" * self.wrapper)
        habits = ("rough" * self.rough, "no-reuse" * (not self.block_reuse), "transceiver" * self.transceiver)
        backend = "" if self.attn_backend == "TRTLLM" else self.attn_backend.lower()
        return "-".join(filter(None, (self.contract, *parts, *habits, backend)))

    @property
    def version(self) -> ContractVersion:
        return contract_version(self.contract)

    @property
    def refusal(self) -> str | None:
        """Why our connector reuses nothing in this engine, None where it does."""
        if self.transceiver:
            return "disaggregated"
        if self.attn_backend == "FLASHINFER" and self.version.flashinfer_layout == "NHD":
            return "attention_backend"
        return None if self.block_reuse else "not_honoured"

    @property
    def habits(self) -> tuple[str, ...]:
        """What a life of some length counts of this engine's own."""
        found = ["failed_forwards"] if self.rough and self.version.survives_failed_forward else []
        if self.refusal is not None:
            return (*found, f"refused_{self.refusal}")
        if self.rough:
            found += ["saves_behind", "saves_together"]
        if self.rough and not self.version.holds_saved_blocks:
            found += ["duplicates_freed", "blocks_handed_on"]
        return tuple(found)


CASES = (
    Case("1.1", v2=False, overlap=False),
    Case("1.2", v2=False, overlap=True),
    Case("1.3rc", v2=False, overlap=True),
    Case("main", v2=False, overlap=False),
    Case("main", v2=True, overlap=False),
    Case("main", v2=True, overlap=True),
    Case("1.2", v2=False, overlap=True, wrapper=True),
    Case("main", v2=False, overlap=False, wrapper=True),
    Case("main", v2=True, overlap=True, wrapper=True),
)
HABIT_CASES = (
    Case("1.1", v2=False, overlap=False, rough=True),
    Case("1.1", v2=False, overlap=True, wrapper=True, rough=True),
    Case("1.2", v2=False, overlap=True, rough=True),
    Case("1.3rc", v2=False, overlap=False, wrapper=True, rough=True),
    Case("main", v2=False, overlap=False, rough=True),
    Case("main", v2=True, overlap=True, wrapper=True, rough=True),
    Case("embedded", v2=False, overlap=True, rough=True),
    Case("main", v2=False, overlap=False, rough=True, block_reuse=False),
    Case("1.1", v2=False, overlap=True, rough=True, transceiver=True),
    Case("1.1", v2=False, overlap=False, rough=True, attn_backend="FLASHINFER"),
    Case("1.3rc", v2=False, overlap=True, rough=True, attn_backend="FLASHINFER"),
)
