import dataclasses
import functools
import json

import numpy as np
import pytest
from flax import nnx
from llama_tools import dense_logits, flat_arrays, random_llama, tiny_config, tokens_of

from flax_paged.models import find_family
from flax_paged.models.llama import ARCHITECTURES, Llama, LlamaConfig, gguf_rules
from flax_paged.nn import RopeConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(architecture="LlamaForCausalLM", **values):
    return LlamaConfig.from_hf({"architectures": [architecture], **SIZES, **values})


def test_a_config_of_transformers_4():
    """SmolLM2's config.json, as published."""
    text = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
    "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"""
    config = LlamaConfig.from_hf(json.loads(text))
    assert config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.041666666666666664,
    )
    assert find_family(json.loads(text)).name == "llama"


def test_both_spellings_of_the_rotary_embedding_give_one_config():
    old = read(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3}, max_position_embeddings=131072)
    new = read(
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}, max_position_embeddings=131072
    )
    assert old == new
    assert new.rope == RopeConfig(500000.0, "llama3", 1.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    with pytest.raises(ValueError, match="remove one"):
        read(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


@pytest.mark.parametrize("given", [{}, {"head_dim": None}, {"head_dim": 16}])
def test_head_dim_left_out(given):
    assert read(**given).head_dim == 16
    assert read(head_dim=24).head_dim == 24


def test_what_each_architecture_takes_for_granted():
    assert read().num_key_value_heads == read(num_key_value_heads=None).num_key_value_heads == 4
    assert read().max_position_embeddings == 2048
    assert read().sliding_window is None
    mistral = read("MistralForCausalLM", num_attention_heads=16, head_dim=8)
    assert (mistral.num_key_value_heads, mistral.sliding_window) == (8, 4096)
    assert read("MistralForCausalLM", num_key_value_heads=2, sliding_window=None).sliding_window is None
    qwen2 = read("Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=32, use_sliding_window=False)
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.sliding_window) == (True, False, None)
    windows = read(
        "Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=32, use_sliding_window=True, max_window_layers=1
    )
    assert [windows.window_of_layer(i) for i in range(2)] == [None, 32]
    qwen3 = read("Qwen3ForCausalLM", num_key_value_heads=2)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.attention_bias) == (True, 128, False)


WRITTEN = [
    tiny_config(),
    tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    tiny_config(rope=RopeConfig(5e5, "llama3", 1.0, 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)),
    tiny_config(rope=RopeConfig(partial_rotary_factor=0.5)),
    tiny_config(architecture="MistralForCausalLM", sliding_window=5),
    tiny_config(architecture="MistralForCausalLM"),
    tiny_config(
        architecture="Qwen2ForCausalLM",
        attention_bias=True,
        attention_output_bias=False,
        sliding_window=5,
        layer_types=("full_attention", "sliding_attention"),
    ),
    tiny_config(architecture="Qwen3ForCausalLM", qk_norm=True),
]


@pytest.mark.parametrize("config", WRITTEN, ids=range(len(WRITTEN)))
def test_what_is_written_is_read_back(config):
    values = json.loads(json.dumps(config.to_hf()))
    assert LlamaConfig.from_hf(values) == config
    assert LlamaConfig.from_hf({**values, "architectures": None}) == config  # by model_type
    hash(config)


def test_a_config_that_no_file_can_express_is_not_written():
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot express this config"):
        tiny_config(qk_norm=True).to_hf()


NEUTRAL = {
    "pretraining_tp": 2,
    "attention_dropout": 0.1,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
    "unsloth_version": "1",
    "residual_multiplier": 1.0,
    "attn_logit_softcapping": None,
    "num_experts": 0,
    "layer_types": ["full_attention"] * 2,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_keys_that_do_not_change_the_numbers_are_ignored(name):
    assert read(**{name: NEUTRAL[name]}) == read()


MEANINGFUL = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 8.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "logit_scale": 0.0625,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "quantization_config": {"quant_method": "gptq"},
    "no_rope_layers": [0, 1],
    "rope_interleaved": True,
    "clip_qkv": 8.0,
    "num_local_experts": 8,
    "attention_chunk_size": 8192,
}


@pytest.mark.parametrize("name", MEANINGFUL)
def test_keys_that_do_are_refused(name):
    with pytest.raises(ValueError, match=f"config.json says {name}=.*not supported"):
        read(**{name: MEANINGFUL[name]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size=0: expected a whole number of at least 1"),
        ({"num_hidden_layers": -2}, "num_hidden_layers=-2"),
        ({"intermediate_size": 96.5}, "intermediate_size=96.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4; give head_dim"),
        ({"head_dim": 15}, "head_dim=15 .* gives 15 rotated"),
        ({"head_dim": -16}, "head_dim=-16"),
        ({"hidden_act": "swiglu"}, "hidden_act='swiglu' is not a known activation; expected one of"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be positive"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "for each of the 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types="),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not given"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not known"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not known; expected one of"),
    ],
)
def test_what_cannot_be_right_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        read(**values)
    if "architectures" in values:
        with pytest.raises(
            ValueError, match="GPT2LMHeadModel.* is not supported; expected one of .*'LlamaForCausalLM'"
        ):
            find_family(values)


def test_families_are_found_by_either_name():
    for model_type, architecture in ARCHITECTURES.items():
        assert find_family({"architectures": [architecture]}).name == "llama"
        assert find_family({"model_type": model_type}).name == "llama"
    with pytest.raises(ValueError, match="model_type='bert' and no architectures, which is not supported"):
        find_family({"model_type": "bert"})
    with pytest.raises(ValueError, match="model_type=None"):
        find_family({})


def test_every_field_changes_something():
    """Parameters, logits or the tables of weights: a field that changes none of them would be a dead one."""
    windowed = small(sliding_window=3, num_hidden_layers=2)
    dynamic = small(rope=RopeConfig(rope_type="dynamic", factor=4.0))
    changes = {
        "vocab_size": (small(), 98),
        "hidden_size": (small(), 64),
        "intermediate_size": (small(), 64),
        "num_hidden_layers": (small(), 2),
        "num_attention_heads": (small(), 2),
        "num_key_value_heads": (small(), 4),
        "head_dim": (small(), 24),
        "hidden_act": (small(), "gelu"),
        "rms_norm_eps": (small(), 0.1),
        "rope": (small(), RopeConfig(100.0)),
        "max_position_embeddings": (dynamic, 8),
        "attention_bias": (small(attention_output_bias=False), True),
        "attention_output_bias": (small(), True),
        "mlp_bias": (small(), True),
        "qk_norm": (small(), True),
        "sliding_window": (small(), 3),
        "layer_types": (windowed, ("sliding_attention", "full_attention")),
        "tie_word_embeddings": (small(), True),
        "initializer_range": (small(), 0.1),
        "architecture": (small(), "Qwen2ForCausalLM"),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(LlamaConfig)}
    for name, (config, value) in changes.items():
        before, after = observe(config), observe(dataclasses.replace(config, **{name: value}))
        same = before[0] == after[0] and before[1] == after[1] and np.allclose(before[2], after[2], atol=1e-3)
        assert not same, name


def small(**changes):
    return tiny_config(**{"num_hidden_layers": 1, **changes})


@functools.cache
def observe(config):
    model = random_llama(config)
    shapes = {path: array.shape for path, array in flat_arrays(model).items()}
    transformed = {path for path, rule in gguf_rules(config).items() if rule.transform is not None}
    return shapes, transformed, dense_logits(model, tokens_of(20))


def test_initializer_range_is_the_spread_of_fresh_weights():
    model = Llama(small(initializer_range=0.07, vocab_size=1000), rngs=nnx.Rngs(0))
    for module in (model.embed_tokens, model.lm_head, model.layers[0].self_attn.q_proj, model.layers[0].mlp.down_proj):
        np.testing.assert_allclose(np.std(module.weight[...]), 0.07, rtol=0.1)
    flat = flat_arrays(model)
    first, second = (flat[f"layers.0.self_attn.{name}.weight"] for name in ("k_proj", "v_proj"))
    assert not np.array_equal(first, second)  # each draws its own numbers
