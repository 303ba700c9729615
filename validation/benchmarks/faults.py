"""Injected faults that no request noticed: all finished, with a cold run's tokens, and the fault was counted.

`python -m validation.benchmarks.faults` injects every fault several times into engines over the shipped model, prints a
table and writes its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.benchmarks.fault_bench import FaultBench
from validation.benchmarks.fault_cases import FAULTS, Injection, inject
from validation.benchmarks.recording import parser_of, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.benchmarks.ttft import Rows

ROUNDS = 6


def run(rounds: int, rows: Rows) -> None:
    """Injects each fault `rounds` times."""
    bench = FaultBench()
    found: list[Injection] = []
    for name in FAULTS:
        found += [inject(bench, name, seed) for seed in range(rounds)]
    bench.close()
    survived = {name: sum(each.survived for each in found if each.name == name) for name in FAULTS}
    by_fault = ", ".join(f"{name} {count} of {rounds}" for name, count in survived.items())
    rows.add("faults_survived", sum(survived.values()), "faults", by_fault, len(found), "higher")
    wrong = sum(each.wrong_tokens for each in found)
    reused = sum(each.reused_tokens for each in found)
    baseline = f"cold answers to the same prompts; {reused:,} tokens reused between the faults"
    rows.add("faults_wrong_tokens", wrong, "tokens", baseline, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, injects, prints and writes."""
    parser = parser_of("faults", __doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each fault; fewer than {ROUNDS} are a dry run")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} injects nothing; at least 1 is needed")
    record(
        "faults",
        options.json,
        {"rounds": options.rounds},
        lambda rows: run(options.rounds, rows),
        dry=options.rounds < ROUNDS,
    )


if __name__ == "__main__":
    main()
