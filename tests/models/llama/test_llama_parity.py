"""Logits against transformers on random weights: the dense form, a paged prefill, and decoding token by token."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_tools import MemorySource, PagedRun, abstract_llama, dense_logits, rope_of_every_type, tokens_of

from flax_paged.checkpoint.assign import assign
from flax_paged.models import find_family
from flax_paged.models.llama import LlamaConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# transformers renames its arguments between minor releases, and warns.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
TOLERANCE = 2e-4


def reference(name="Llama", **changes):
    """A random model of transformers, biases and norms included."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for path, parameter in model.named_parameters():
        if "bias" in path or "norm" in path:
            torch.nn.init.normal_(parameter.data, 1.0 if "norm" in path else 0.0, 0.3)
    return model


def ours(theirs):
    """The same model of ours, from the config.json and the tensors that transformers would save."""
    values = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    family = find_family(values)
    config = family.config_from_hf(values)
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    return assign(abstract_llama(config), MemorySource(tensors), family.hf_rules(config), progress=False)


def their_logits(model, tokens):
    model = copy.deepcopy(model)  # their dynamic rope remembers the longest sequence of earlier calls
    with torch.no_grad():
        return model(torch.tensor(tokens)[None].long()).logits[0].float().numpy()


def check_all_forms(theirs, length=21):
    model, tokens = ours(theirs), tokens_of(length)
    expected = their_logits(theirs, tokens)
    assert 0.5 < np.abs(expected).max() < 50
    dense = dense_logits(model, tokens)
    np.testing.assert_allclose(dense, expected, atol=TOLERANCE, rtol=0)
    # Prefill of all but 5 tokens beside another sequence, then both are decoded token by token.
    other = tokens_of(7, seed=1)
    run = PagedRun(model, [len(tokens) + 1, len(other) + 6], max_num_tokens=64)
    prefill = run({1: other, 0: tokens[:-5]})
    np.testing.assert_allclose(prefill[0], their_logits(theirs, tokens[:-5]), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(prefill[1], their_logits(theirs, other), atol=TOLERANCE, rtol=0)
    for i, expected in zip(range(length - 5, length), their_decode(theirs, tokens, 5), strict=True):
        got = run({0: tokens[i : i + 1], 1: other[:1]})
        np.testing.assert_allclose(got[0][0], expected, atol=TOLERANCE, rtol=0)
    return dense


def their_decode(model, tokens, num_decoded):
    """Their logits of the last tokens, one at a time with their cache (dynamic rope depends on it)."""
    model, tokens, out = copy.deepcopy(model), torch.tensor(tokens)[None].long(), []
    with torch.no_grad():
        state = model(tokens[:, :-num_decoded], use_cache=True)
        for i in range(tokens.shape[1] - num_decoded, tokens.shape[1]):
            state = model(tokens[:, i : i + 1], past_key_values=state.past_key_values, use_cache=True)
            out.append(state.logits[0, 0].numpy())
    return out


VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim-wider": {"head_dim": 32},
    "head_dim-24": {"head_dim": 24},
    "head_dim-80-one-kv-head": {"head_dim": 80, "num_key_value_heads": 1},
    "as-many-kv-heads": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_llama(name):
    check_all_forms(reference(**VARIANTS[name]))


@pytest.mark.parametrize("length", [21, 50])
@pytest.mark.parametrize("rope_type", rope_of_every_type())
def test_every_rope_type(rope_type, length):
    """Within the model's context of 32 tokens and beyond it."""
    parameters = rope_of_every_type()[rope_type]
    scaled = check_all_forms(reference(rope_parameters=parameters), length)
    plain = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    if rope_type != "default" and (length > 32 or rope_type != "dynamic"):
        assert np.abs(scaled - their_logits(reference(rope_parameters=plain), tokens_of(length))).max() > 0.05


LOOK_ALIKES = {
    "Mistral": {"sliding_window": 5},
    "Mistral-no-window": {"sliding_window": None, "head_dim": 24},
    "Qwen2": {},
    "Qwen2-windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"head_dim": 24},
    "Qwen3-biases": {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name):
    theirs = reference(name.split("-")[0], **LOOK_ALIKES[name])
    out = check_all_forms(theirs)
    if "window" in str(LOOK_ALIKES[name]) and "no-window" not in name:
        wide = reference(name.split("-")[0], **{**LOOK_ALIKES[name], "sliding_window": 100})
        assert np.abs(out - their_logits(wide, tokens_of(21))).max() > 0.05


@pytest.mark.parametrize("rope_type", ["llama3", "linear", "dynamic", "yarn", "yarn-fields", "yarn-mscale", "longrope"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_inverse_frequencies(rope_type, head_dim):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from flax_paged.nn.rope import attention_factor, inverse_frequencies

    parameters = dict(rope_of_every_type()[rope_type])
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = list(np.linspace(1, 3, head_dim // 2))
    config = transformers.LlamaConfig(**{**BASE, "head_dim": head_dim, "rope_parameters": parameters})
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = LlamaConfig.from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim, 32), expected.numpy(), rtol=1e-6)
    assert attention_factor(rope, 32) == pytest.approx(factor, rel=1e-12)


def test_transformers_reads_the_config_we_write():
    for name, changes in {"Llama": VARIANTS["biases"], **LOOK_ALIKES}.items():
        theirs = reference(name.split("-")[0], **changes).config
        values = {**theirs.to_dict(), "architectures": [f"{name.split('-')[0]}ForCausalLM"]}
        config = LlamaConfig.from_hf(values)
        again = type(theirs)(**config.to_hf()).to_dict()
        assert LlamaConfig.from_hf({**again, "architectures": values["architectures"]}) == config
        fields = ("hidden_size", "num_key_value_heads", "sliding_window", "tie_word_embeddings")
        for field in (*fields, "rms_norm_eps", "hidden_act", "max_position_embeddings", "layer_types"):
            assert again.get(field) == theirs.to_dict().get(field), (name, field)
        assert again["rope_parameters"]["rope_theta"] == theirs.rope_parameters["rope_theta"]


def test_bfloat16_is_as_near_to_float32_as_theirs():
    theirs = reference(tie_word_embeddings=True)
    model, tokens = ours(theirs), tokens_of(21)
    low = nnx.merge(nnx.graphdef(model), nnx.map(lambda _, x: x.astype(jnp.bfloat16), nnx.state(model)))
    expected = their_logits(theirs, tokens)
    got = dense_logits(low, tokens)
    assert got.dtype == np.float32
    theirs_low = their_logits(theirs.bfloat16(), tokens)
    error, their_error = (np.sqrt(np.mean((x - expected) ** 2)) for x in (got, theirs_low))
    assert 0 < error < 1.1 * their_error
