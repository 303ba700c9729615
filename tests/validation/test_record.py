"""The rows of an end-to-end run, made of its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.exactness import Exactness
from validation.record import end_to_end_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.results import Measured
    from validation.samples import Sample


def test_the_rows_of_a_run_have_their_names(make_sample: Callable[..., Sample], measured: Measured) -> None:
    samples = []
    for size in ("2k", "4k"):
        samples += [make_sample(size=size, arm="cold", speedup=1.0, ttft_s=0.4), make_sample(size=size)]
    samples.append(make_sample(workload="unrelated", expects="none", reused_tokens=0))
    rows = {row.name: row for row in end_to_end_rows(samples, Exactness(1e-5, "stock"), "cpu", measured)}
    assert list(rows) == [
        "cpu_shifted_2k_ttft_speedup",
        "cpu_shifted_4k_ttft_speedup",
        "cpu_harmless_em_drop",
        "cpu_unrelated_fires",
        "wrapper_exactness_max_logit_diff",
    ]
    assert all(row.holds for row in rows.values())
    assert rows["cpu_shifted_4k_ttft_speedup"].value == 4.0
    assert "400 ms" in rows["cpu_shifted_4k_ttft_speedup"].baseline
    assert not end_to_end_rows([make_sample(workload="prompts", size="any")], None, "cpu", measured)


def test_a_run_with_a_profile_and_a_trap_has_rows_of_both(
    make_sample: Callable[..., Sample], measured: Measured
) -> None:
    samples = [make_sample(size="2k", arm="cold", speedup=1.0, ttft_s=0.4)]
    samples += [make_sample(size="2k", arm=arm) for arm in ("position_fix", "verified")]
    samples += [
        make_sample(workload="header_trap", arm=arm, exact_match=right)
        for arm, right in (("cold", True), ("position_fix", False), ("verified", True))
    ]
    rows = {row.name: row for row in end_to_end_rows(samples, None, "cpu", measured)}
    assert rows["cpu_verified_2k_ttft_speedup"].value == 4.0
    assert "of which verified computes" in rows["cpu_verified_2k_ttft_speedup"].baseline
    assert (rows["cpu_verified_em_drop"].value, rows["cpu_verified_em_drop"].holds) == (0.0, True)
    assert (rows["cpu_trap_position_fix_em"].value, rows["cpu_trap_position_fix_em"].goal) == (0.0, 0.5)
    # The trap is no harmless prompt.
    assert rows["cpu_harmless_em_drop"].value == 0.0
