"""The prompts of the benchmarks' model."""

from benchmarks.bench_model import DONOR_INSTRUCTION, INSTRUCTION, NEW_TOKENS, Prompts, label


def test_prompts_share_the_document_and_nothing_else():
    prompts = Prompts(1000)
    document = prompts.document(600)
    assert len(document) == 600 - NEW_TOKENS
    donor, first, second = prompts.donor(document), prompts.shifted(document), prompts.shifted(document)
    assert len(donor) == len(first) == len(second) == 600
    assert donor[DONOR_INSTRUCTION:][: len(document)] == first[INSTRUCTION:][: len(document)] == document
    assert first[:INSTRUCTION] != second[:INSTRUCTION]
    assert (label(24_576), label(500)) == ("24k", "500")
