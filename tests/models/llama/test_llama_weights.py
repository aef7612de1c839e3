import jax
import numpy as np
import pytest
from flax import nnx
from llama_tools import (
    MemorySource,
    PagedRun,
    abstract_llama,
    dense_logits,
    flat_arrays,
    random_llama,
    tiny_config,
    tokens_of,
)

from flax_paged.checkpoint.assign import assign
from flax_paged.models.llama import Llama, gguf_ignorable, gguf_rules, hf_ignorable, hf_rules

CONFIGS = {
    "plain": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "biases": tiny_config(attention_bias=True, mlp_bias=True),
    "qwen2": tiny_config(architecture="Qwen2ForCausalLM", attention_bias=True, attention_output_bias=False),
    "qwen3": tiny_config(architecture="Qwen3ForCausalLM", qk_norm=True),
    # 8 and 2 heads: n_head / n_kv must differ from n_kv, else a wrong head count goes unseen.
    "grouped": tiny_config(num_attention_heads=8, num_key_value_heads=2, head_dim=8, attention_bias=True),
}


def hf_tensors(config):
    """A checkpoint in Hugging Face's names, with random content."""
    arrays = flat_arrays(random_llama(config))
    return {rule.name: arrays[path] for path, rule in hf_rules(config).items()}


def load(config, tensors, *, rules=hf_rules, ignorable=hf_ignorable):
    return assign(abstract_llama(config), MemorySource(tensors), rules(config), ignorable=ignorable, progress=False)


def permute_like_llama_cpp(weights, num_heads):
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def to_gguf(config, tensors):
    """What llama.cpp's converter makes of a Hugging Face checkpoint."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    out = {}
    for name, array in tensors.items():
        if config.architecture == "LlamaForCausalLM" and ".q_proj." in name:
            array = permute_like_llama_cpp(array, config.num_attention_heads)
        if config.architecture == "LlamaForCausalLM" and ".k_proj." in name:
            array = permute_like_llama_cpp(array, config.num_key_value_heads)
        module, leaf = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            out[f"blk.{layer}.{names[module]}.{leaf}"] = array
        else:
            out[f"{names[module]}.{leaf}"] = array
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_and_hugging_face_give_the_same_model(name):
    config = CONFIGS[name]
    tensors = hf_tensors(config)
    from_hf = load(config, tensors)
    from_gguf = load(config, to_gguf(config, tensors), rules=gguf_rules, ignorable=gguf_ignorable)
    expected = flat_arrays(from_hf)
    for path, array in flat_arrays(from_gguf).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
    np.testing.assert_array_equal(dense_logits(from_gguf, tokens_of(9)), dense_logits(from_hf, tokens_of(9)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_one_rule(name):
    config = CONFIGS[name]
    paths = set(flat_arrays(random_llama(config)))
    for rules in (hf_rules(config), gguf_rules(config)):
        assert set(rules) == paths
        names = [rule.name for rule in rules.values()]
        assert len(set(names)) == len(names)


def test_gguf_names_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for name, architecture in (("biases", "LLAMA"), ("qwen2", "QWEN2"), ("qwen3", "QWEN3")):
        config = CONFIGS[name]
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)
        hf, ours = hf_rules(config), gguf_rules(config)
        for path in hf:
            expected = table.get_name(hf[path].name, try_suffixes=(".weight", ".bias"))
            assert ours[path].name == expected, path


def test_only_q_and_k_are_permuted():
    for name, config in CONFIGS.items():
        transformed = {path.split(".")[3] for path, rule in gguf_rules(config).items() if rule.transform is not None}
        assert transformed == (set() if name.startswith("qwen") else {"q_proj", "k_proj"})
        assert all(rule.transform is None for rule in hf_rules(config).values())


def test_tied_output_absent_or_equal_is_fine():
    config = CONFIGS["tied"]
    tensors = hf_tensors(config)
    assert "lm_head.weight" not in tensors
    absent = load(config, tensors)
    equal = load(config, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    np.testing.assert_array_equal(dense_logits(absent, tokens_of(5)), dense_logits(equal, tokens_of(5)))
    only_head = dict(tensors)
    only_head["lm_head.weight"] = only_head.pop("model.embed_tokens.weight")
    np.testing.assert_array_equal(
        dense_logits(load(config, only_head), tokens_of(5)), dense_logits(absent, tokens_of(5))
    )
    gguf = to_gguf(config, tensors)
    gguf["output.weight"] = gguf["token_embd.weight"]
    load(config, gguf, rules=gguf_rules)


def test_tied_output_that_differs_is_refused():
    config = CONFIGS["tied"]
    tensors = hf_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"):
        load(config, tensors)


def test_untied_output_is_used_and_must_be_there():
    config = CONFIGS["plain"]
    tensors = hf_tensors(config)
    before = dense_logits(load(config, tensors), tokens_of(5))
    doubled = load(config, {**tensors, "lm_head.weight": 2 * tensors["lm_head.weight"]})
    np.testing.assert_allclose(dense_logits(doubled, tokens_of(5)), 2 * before, rtol=1e-5)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"(?s)Missing tensors:.*lm_head\.weight"):
        load(config, tensors)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_denies_are_refused(field):
    """And those that it promises must be there."""
    biased, plain = tiny_config(**{field: True}), tiny_config()
    part = "self_attn.o_proj.bias" if field == "attention_bias" else "mlp.down_proj.bias"
    with pytest.raises(ValueError, match=rf"(?s)Unexpected tensors.*{part}"):
        load(plain, hf_tensors(biased))
    with pytest.raises(ValueError, match=rf"(?s)Missing tensors.*{part}"):
        load(biased, hf_tensors(plain))


def test_rotary_tables_may_go_unused_and_nothing_else():
    config = CONFIGS["plain"]
    tensors = hf_tensors(config)
    table = np.ones(8, np.float32)
    load(config, {**tensors, "model.layers.1.self_attn.rotary_emb.inv_freq": table, "model.rotary_emb.inv_freq": table})
    for name in (
        "rope_freqs.weight",
        "model.layers.1.self_attn.q_proj.weight_scale",
        "model.layers.9.mlp.up_proj.weight",
    ):
        assert not hf_ignorable(name)
        with pytest.raises(ValueError, match=r"(?s)Unexpected tensors"):
            load(config, {**tensors, name: table})
    assert gguf_ignorable("rope_freqs.weight")
    assert not gguf_ignorable("blk.0.attn_q.bias")


def test_head_dim_sets_the_shapes():
    """hidden 64, 4 heads, 2 KV heads of 32: q is [128, 64], k [64, 64], o [64, 128]."""
    config = tiny_config(hidden_size=64, head_dim=32)
    shapes = {path: array.shape for path, array in flat_arrays(random_llama(config)).items()}
    prefix = "layers.0.self_attn."
    assert shapes[prefix + "q_proj.weight"] == (128, 64)
    assert shapes[prefix + "k_proj.weight"] == shapes[prefix + "v_proj.weight"] == (64, 64)
    assert shapes[prefix + "o_proj.weight"] == (64, 128)
    with pytest.raises(ValueError, match=r"(?s)wrong shape.*q_proj"):
        load(tiny_config(hidden_size=64), hf_tensors(config))


def test_two_devices_give_the_numbers_of_one():
    """Heads, MLP and vocabulary split by the weights' logical axes, in both forms."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    config = CONFIGS["biases"]
    tensors, tokens = hf_tensors(config), tokens_of(9)
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), mesh=mesh))
    split = assign(abstract, MemorySource(tensors), hf_rules(config), mesh=mesh, progress=False)
    assert split.layers[0].mlp.gate_proj.weight[...].sharding.shard_shape((80, 48)) == (40, 48)
    assert split.layers[0].self_attn.o_proj.weight[...].sharding.shard_shape((48, 64)) == (48, 32)
    expected = dense_logits(load(config, tensors), tokens)
    np.testing.assert_allclose(dense_logits(split, tokens), expected, rtol=0, atol=1e-4)
    run = PagedRun(split, [9])
    np.testing.assert_allclose(run({0: tokens[:8]})[0], expected[:8], rtol=0, atol=1e-4)
    np.testing.assert_allclose(run({0: tokens[8:]})[0][0], expected[8], rtol=0, atol=1e-4)
