"""Bad inputs that were refused with a sentence or a status 4xx, at every door: none crashed, hung or ended in 500.

`python -m validation.benchmarks.bad_inputs` gives bad command lines and settings, requests to a router and a worker,
donor events, and files. Some are written down here, some are spoiled good ones (seeded); what is still good after it
was spoiled does not count. Commands end with status 2 and one sentence, requests are answered with 4xx, files are
refused with a sentence, and bad events and donors' files are counted and change nothing. Each has a time to end in.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from validation.benchmarks import bad_commands, bad_events, bad_files, bad_requests
from validation.benchmarks.recording import parser_of, record
from validation.benchmarks.spoiling import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from validation.benchmarks.spoiling import Tried
    from validation.benchmarks.ttft import Rows

logger = logging.getLogger(__name__)

SPOILED, PROCESSES, LEAST = 100, 12, 1_000


def tries(folder: Path, spoiled: int, processes: int) -> Iterator[Tried]:
    """Every bad input, with `spoiled` spoiled ones of each kind."""
    places = [folder / name for name in ("requests", "files", "commands")]
    for each in places:
        each.mkdir()
    yield from bad_requests.tries(places[0], spoiled)
    yield from bad_events.tries(2 * spoiled, spoiled)
    yield from bad_files.tries(places[1], spoiled)
    yield from bad_commands.tries(places[2], processes)


def run(spoiled: int, processes: int, rows: Rows) -> None:
    """Gives them all. A fault is said at once, and has the row not hold."""
    refused: Counter[str] = Counter()
    taken = faults = 0
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as folder:
        for each in tries(Path(folder), spoiled, processes):
            refused[each.door] += each.answer is Answer.REFUSED
            taken += each.answer is Answer.TAKEN
            faults += each.answer is Answer.FAULT
            if each.answer is Answer.FAULT:
                logger.warning("%s, %s: %s", each.door, each.what, each.told)
    by_door = ", ".join(f"{count:,} {door}" for door, count in refused.items())
    told = f"{refused.total() + faults:,} bad inputs: {by_door}; {faults} crashed, hung, ended in 500 or were taken"
    goal = max(LEAST, refused.total() + faults)
    rows.add("bad_inputs_refused", refused.total(), "inputs", told, goal, "higher")
    logger.info("%d spoiled inputs were still good ones", taken)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, tries, prints and writes."""
    parser = parser_of("bad_inputs", __doc__)
    parser.add_argument(
        "--spoiled", type=int, default=SPOILED, help=f"of each kind; fewer than {SPOILED} are a dry run"
    )
    parser.add_argument(
        "--processes", type=int, default=PROCESSES, help="command lines that get a process of their own"
    )
    options = parser.parse_args(arguments)
    if options.spoiled < 1 or options.processes < 0:
        parser.error(f"--spoiled {options.spoiled} --processes {options.processes}; at least 1 and 0 are needed")
    record(
        "bad_inputs",
        options.json,
        {"spoiled": options.spoiled, "processes": options.processes},
        lambda rows: run(options.spoiled, options.processes, rows),
        dry=options.spoiled < SPOILED or options.processes < PROCESSES,
    )


if __name__ == "__main__":
    main()
