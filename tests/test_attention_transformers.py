"""`PagedAttention` against the attention of transformers' own models: sinks, chunks, caps and windows, ALiBi, encoders.

Each model is tiny and random. Its attention function is wrapped to record queries, keys, values and result as the model
really computes them; the layer gets the same queries, keys and values, in pages and in one batch.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_paged import CacheSpec, PagedAttention
from flax_paged.metadata import SequenceSlice, build_metadata

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH, H, KV, D = 23, 4, 2, 16
COMMON = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": H,
    "num_key_value_heads": KV, "head_dim": D, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip


def record_attention(name, model_class, config, module):
    """Run a model on random tokens; returns each attention layer with its q, k, v [L, heads, D] and out [L, H * D]."""
    records = []

    def recording(layer, query, key, value, mask, **options):
        out, weights = module.eager_attention_forward(layer, query, key, value, mask, **options)
        records.append((layer, *(x[0].transpose(0, 1).numpy() for x in (query, key, value)), out[0].flatten(1).numpy()))
        return out, weights

    transformers.AttentionInterface.register(f"recording_{name}", recording)
    transformers.AttentionMaskInterface.register(
        f"recording_{name}", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    )
    torch.manual_seed(0)
    config._attn_implementation = f"recording_{name}"
    model = model_class._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        model(torch.randint(50, (1, LENGTH), generator=torch.Generator().manual_seed(1)))
    assert len(records) == 2
    return records


def check(layer_options, q, k, v, expected, sinks=None, tolerance=2e-5):
    """Compare the layer, paged in two chunks (an encoder in one) and dense, with the recorded result."""
    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    spec = CacheSpec(num_kv_heads, head_dim, num_pages=8, page_size=4, dtype=jnp.float32)
    layer = PagedAttention(num_heads, num_kv_heads, head_dim, cache=spec, sinks=sinks is not None, **layer_options)
    if sinks is not None:
        layer.sinks[...] = jnp.asarray(sinks)
    outs, pages = [], [5, 2, 7, 0, 1, 3]
    split = 9 if layer.attention_type == "decoder" else LENGTH
    for first, end in ((0, split), (split, LENGTH)):
        if first == end:
            continue
        metadata = build_metadata(
            [SequenceSlice(pages, first, end - first)],
            page_size=4, num_pages=8, max_num_tokens=end - first, max_num_seqs=1, max_pages_per_seq=6,
        )  # fmt: skip
        outs.append(np.asarray(layer(*(x[first:end] for x in (q, k, v)), metadata)))
    layer.drop_cache()
    dense = np.asarray(layer(*(x[None] for x in (q, k, v))))[0]
    for out in (np.concatenate(outs), dense):
        np.testing.assert_allclose(out.reshape(LENGTH, -1), expected, rtol=tolerance, atol=tolerance)


def test_sinks_and_windows_of_gpt_oss():
    from transformers.models.gpt_oss import modeling_gpt_oss as module

    config = transformers.GptOssConfig(
        **COMMON, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    for layer, *arrays in record_attention("gpt_oss", transformers.GptOssForCausalLM, config, module):
        check({"sliding_window": layer.sliding_window, "scale": layer.scaling}, *arrays, sinks=layer.sinks.detach())


def test_chunks_of_llama4():
    from transformers.models.llama4 import modeling_llama4 as module

    config = transformers.Llama4TextConfig(
        **COMMON, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=7, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    records = record_attention("llama4", transformers.Llama4ForCausalLM, config, module)
    for (layer, *arrays), chunk in zip(records, (7, None), strict=True):
        check({"attention_chunk_size": chunk, "scale": layer.scaling}, *arrays)


def test_caps_and_alternating_windows_of_gemma2():
    from transformers.models.gemma2 import modeling_gemma2 as module

    config = transformers.Gemma2Config(
        **COMMON, sliding_window=6, attn_logit_softcapping=3.0, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    for layer, *arrays in record_attention("gemma2", transformers.Gemma2ForCausalLM, config, module):
        check({"sliding_window": layer.sliding_window, "soft_cap": 3.0, "scale": layer.scaling}, *arrays)


def test_the_encoder_of_bert():
    from transformers.models.bert import modeling_bert as module

    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=H, vocab_size=50
    )
    for layer, *arrays in record_attention("bert", transformers.BertModel, config, module):
        check({"attention_type": "encoder", "scale": layer.scaling}, *arrays)


def test_alibi_of_mpt():
    from transformers.models.mpt import modeling_mpt as module

    config = transformers.MptConfig(d_model=H * D, n_heads=H, n_layers=1, max_seq_len=64, expansion_ratio=1)
    torch.manual_seed(0)
    attention = module.MptAttention(config, layer_idx=0).eval()
    attention.out_proj = torch.nn.Identity()
    hidden = torch.randn(1, LENGTH, H * D)
    bias = module.build_mpt_alibi_tensor(H, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        expected = attention(hidden, bias, attention_mask=mask)[0][0].numpy()
        q, k, v = (x[0].reshape(LENGTH, H, D).numpy() for x in attention.Wqkv(hidden).chunk(3, dim=2))
    slopes = (bias[:, 0, -1] - bias[:, 0, -2]).numpy()
    check({"alibi_slopes": slopes, "scale": attention.softmax_scale}, q, k, v, expected)
