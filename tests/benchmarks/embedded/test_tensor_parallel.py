"""The benchmarks' model and prompts, and the dry run of tensor parallelism."""

import pytest

from benchmarks.embedded import tensor_parallel
from benchmarks.embedded.bench_model import DONOR_INSTRUCTION, INSTRUCTION, NEW_TOKENS, Prompts, label
from tests.benchmarks.dry_runs import dry_rows


def test_two_processes_answer_as_one_does(tmp_path):
    rows = dry_rows(tensor_parallel, tmp_path, "--backend", "gloo", "--layers", "2", "--size", "512")
    assert rows["tp2_tokens_equal"].value == rows["tp2_ranks_agree"].value == 1


def test_without_cards_a_dry_run_is_offered(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        tensor_parallel.main([])
    assert "torch sees 0 CUDA devices; --backend gloo" in capsys.readouterr().err


def test_prompts_share_the_document_and_nothing_else():
    prompts = Prompts(1000)
    document = prompts.document(600)
    assert len(document) == 600 - NEW_TOKENS
    donor, first, second = prompts.donor(document), prompts.shifted(document), prompts.shifted(document)
    assert len(donor) == len(first) == len(second) == 600
    assert donor[DONOR_INSTRUCTION:][: len(document)] == first[INSTRUCTION:][: len(document)] == document
    assert first[:INSTRUCTION] != second[:INSTRUCTION]
    assert (label(24_576), label(500)) == ("24k", "500")
