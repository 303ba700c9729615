"""The exported graph against the model that it was made from, with the real weights of all-MiniLM-L6-v2."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.embedders import GRAPH_FILE, OnnxEmbedder, embedder_for, export, graph_of, sentence_model

MISSING = [name for name in ("sentence_transformers", "onnxruntime", "onnxscript") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SENTENCES = ["A man is eating food.", "Someone eats a piece of bread."]
SENTENCES += ["The central bank raised interest rates on Tuesday."]
LONG = " ".join(f"On day {day} the crew of hangar {day * 7 % 13} mended {day * 3 % 11} engines." for day in range(120))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of the model on this machine, with its graph."""
    try:
        model = sentence_model(None, "onnx", "onnx")
    except ConfigurationError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("embedder")
    for each in model.folder.iterdir():
        (folder / each.name).symlink_to(each)
    export(model, folder / GRAPH_FILE)
    return folder


@pytest.fixture(scope="module")
def embedders(exported):
    return embedder_for(EmbedderKind.ONNX, exported), embedder_for(EmbedderKind.MINILM, exported)


def test_graph_and_torch_agree_to_a_thousandth_in_cosine_distance(embedders):
    onnx, torch_based = embedders
    texts = [*SENTENCES, LONG, "", "word " * 600, "语言模型共享文档。" * 100]
    ours, theirs = onnx.embed(texts), torch_based.embed(texts)
    assert ours.shape == theirs.shape == (len(texts), 384)
    assert not ours[4].any()
    assert not theirs[4].any()
    kept = [number for number in range(len(texts)) if number != 4]
    distances = 1 - np.einsum("ij,ij->i", ours[kept], theirs[kept])
    assert np.all(distances <= 1e-3), distances


def test_like_is_nearer_than_unlike(embedders):
    eating, bread, bank = embedders[0].embed(SENTENCES)
    assert eating @ bread > 0.5
    assert eating @ bank < 0.2


def test_documents_in_another_order_are_near(embedders):
    parts = [LONG, "Lamps, bolts and flutes are kept in annex Oslo. " * 40, "Anna Berg lives in Dartford. " * 60]
    forward, backward = embedders[0].embed(["\n".join(parts), "\n".join(reversed(parts))])
    assert forward @ backward > 0.95


def test_without_a_graph_in_the_folder_one_is_made_once(exported, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def copied(model, path):
        made.append(path)
        path.parent.mkdir(parents=True)
        path.write_bytes((exported / GRAPH_FILE).read_bytes())

    monkeypatch.setattr("semblend_trt.semantic.embedders.export", copied)
    model = sentence_model(None, "onnx", "onnx")
    assert graph_of(model) == graph_of(model) == tmp_path / "semblend_trt" / f"{model.digest}.onnx"
    assert len(made) == 1


def test_a_damaged_graph_is_named(exported, tmp_path):
    for each in exported.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / GRAPH_FILE).unlink()
    (tmp_path / GRAPH_FILE).write_bytes(b"no graph")
    with pytest.raises(ConfigurationError, match="is no graph that ONNX Runtime can run"):
        OnnxEmbedder(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_onnx_gpu_names_its_extra():
    with pytest.raises(ConfigurationError, match=r"pip install 'semblend-trt\[onnx-gpu\]'"):
        OnnxEmbedder(on_gpu=True)
