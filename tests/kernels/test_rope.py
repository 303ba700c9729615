"""A rotated key moved by a shift is the key that the model's own rotary module would have produced there."""

import pytest
import torch
from transformers import GlmConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from kernels.rope import LayerRotations, RopeRotation, by_layer, rotate_keys, still
from tests.kernels.builders import error_of, rotation_of, seeded

HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 256}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GUESSED = {name: size for name, size in HEADS.items() if name != "head_dim"}
MODELS = {
    "qwen2": (modeling_qwen2, Qwen2Config(**HEADS, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3_yarn": (modeling_qwen3, Qwen3Config(**HEADS, rope_parameters=YARN, max_position_embeddings=16384)),
    "llama3": (modeling_llama, LlamaConfig(**HEADS, rope_parameters=LLAMA3)),
    "phi3_partial": (modeling_phi3, Phi3Config(**GUESSED, rope_parameters=PARTIAL, pad_token_id=0)),
    "glm_partial_interleaved": (modeling_glm, GlmConfig(**HEADS, rope_parameters=PARTIAL, pad_token_id=0)),
}


class RotaryModel:
    """A model's own rotary module and the function that applies it."""

    def __init__(self, name):
        modeling, config = MODELS[name]
        self.rotary = next(kind for each, kind in vars(modeling).items() if each.endswith("RotaryEmbedding"))(config)
        self.apply = modeling.apply_rotary_pos_emb
        frequencies = tuple(self.rotary.inv_freq.double().tolist())
        self.rotation = RopeRotation(frequencies, 2 * len(frequencies), interleaved="interleaved" in name)

    def exact_keys_at(self, keys, start):
        """`keys` [1, heads, tokens, head_dim] at positions start.. by the model's code, with exact angles: the module
        itself rounds position * frequency to float32."""
        positions = torch.arange(start, start + keys.shape[2], dtype=torch.float64)
        angles = positions[:, None] * self.rotary.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)[None]
        cos, sin = angles.cos() * self.rotary.attention_scaling, angles.sin() * self.rotary.attention_scaling
        return self.apply(keys.double(), keys.double(), cos, sin)[1].float()


def sample_keys(tokens=80):
    return seeded(1, 2, tokens, 64, seed=7)


@pytest.mark.known_defect(6, 27)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("start", "shift"), [(0, 37), (3, 512), (11, 4000), (900, -37), (600, -512), (4100, -4000)])
def test_a_moved_key_is_the_models_key_at_the_new_position(name, start, shift):
    model, keys = RotaryModel(name), sample_keys()
    moved = rotate_keys(model.exact_keys_at(keys, start), shift, model.rotation)
    assert error_of(moved, model.exact_keys_at(keys, start + shift)) <= 1e-6


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_before_and_beyond_those_that_rotate_pass(interleaved):
    keys = seeded(2, 3, 20, seed=1)
    copy, rotation = keys.clone(), RopeRotation((1.0, 0.1), 4, interleaved, first_channel=12)
    rotated = rotate_keys(keys, 5, rotation)
    assert torch.equal(rotated[..., :12], keys[..., :12])
    assert torch.equal(rotated[..., 16:], keys[..., 16:])
    leading = rotate_keys(keys[..., 12:16], 5, RopeRotation((1.0, 0.1), 4, interleaved))
    assert torch.equal(rotated[..., 12:16], leading)
    assert not torch.equal(leading, copy[..., 12:16])
    assert torch.equal(keys, copy)
    with pytest.raises(ValueError, match="head_dim 15, below the rotary_dim 4 behind the first_channel 12"):
        rotate_keys(keys[..., :15], 5, rotation)
    with pytest.raises(ValueError, match="first_channel is -1"):
        RopeRotation((1.0, 0.1), 4, first_channel=-1)


@pytest.mark.parametrize(("frequencies", "rotary_dim"), [((1.0,), 4), ((), 0), ((1.0, 0.5), 3)])
def test_frequencies_and_rotary_dim_must_agree(frequencies, rotary_dim):
    with pytest.raises(ValueError, match=f"rotary_dim {rotary_dim}"):
        RopeRotation(frequencies, rotary_dim)


def test_layers_that_rotate_alike_have_one_rotation():
    turning, none = rotation_of(), still(8)
    assert by_layer([turning] * 3) is turning
    rotations = by_layer([turning, none, turning, turning])
    assert isinstance(rotations, LayerRotations)
    assert [rotations.of_layer(layer) for layer in range(4)] == [turning, none, turning, turning]
    assert rotations.layers(1, 3) == LayerRotations((turning, none), (1, 0))
    assert (none.is_still, turning.is_still) == (True, False)
    keys = sample_keys(5)
    assert rotate_keys(keys, 9, none) is keys


@pytest.mark.parametrize(
    ("kinds", "kind_of_layer", "told"),
    [
        ((still(8), still(4)), (0, 1), r"rotations of layers turn \[\(4, False, 0\), \(8, False, 0\)\]"),
        ((rotation_of(), rotation_of(interleaved=True)), (0, 1), "rotations of layers turn"),
        ((), (), r"rotations of layers turn \[\]"),
        ((rotation_of(),), (0, 1), r"kind_of_layer is \(0, 1\), not all in 0\.\.0"),
        ((rotation_of(),), (-1,), r"kind_of_layer is \(-1,\)"),
    ],
)
def test_layers_of_other_planes_or_no_kind_are_refused(kinds, kind_of_layer, told):
    with pytest.raises(ValueError, match=told):
        LayerRotations(kinds, kind_of_layer)
