"""Short runs of benchmarks, which promise nothing."""

from validation.results import read_rows


def dry_rows(benchmark, folder, *arguments):
    """What a dry run writes, by name; its rows have no goals and name its command line."""
    benchmark.main([*arguments, "--json", str(folder / "out")])
    rows = [row for each in read_rows(folder).values() for row in each]
    assert all(row.goal is None and row.holds and " ".join(arguments) in row.command for row in rows)
    return {row.name: row for row in rows}
