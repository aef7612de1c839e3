"""`Llama`, the reference decoder: attention, block, model."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from flax_paged.attention import PagedAttention, drop_cache, init_cache
from flax_paged.cache import CacheSpec
from flax_paged.metadata import PagedMetadata
from flax_paged.models.llama.config import LlamaConfig
from flax_paged.nn.embedding import Embedding
from flax_paged.nn.linear import Linear, contract_last
from flax_paged.nn.mlp import GatedMLP
from flax_paged.nn.norms import RMSNorm
from flax_paged.nn.remat import call_layer
from flax_paged.nn.rope import apply_rope, depends_on_seq_lens, rope_tables


class Batch(NamedTuple):
    """What each layer needs besides the hidden states; the same for all layers, made once a step."""

    cos: jax.Array  # f32[T, rotary_dim / 2], or [B, L, rotary_dim / 2] in the dense form
    sin: jax.Array
    metadata: PagedMetadata | None  # paged form
    positions: jax.Array | None  # dense form
    segment_ids: jax.Array | None  # dense form
    adapter_ids: jax.Array | None  # i32[T] or i32[B, L]: each token's adapter, where several are stacked


class LlamaAttention(nnx.Module):
    """Grouped-query attention with rotary embedding, over the paged cache or within the batch.

    Args:
        config: Hyperparameters.
        layer: Index of the layer.
        dtype: Dtype of the parameters.
        cache: Shape of the layer's cache, or None.
        mesh: Device mesh, or None.
        implementation: Passed to the ops.
        rngs: Source of initial weights.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        dtype: Any,
        cache: CacheSpec | None,
        mesh: Mesh | None,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(Linear, initializer_range=config.initializer_range, dtype=dtype, rngs=rngs)
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = linear(config.hidden_size, q_size, use_bias=bias, axes=("heads", "embed"))
        self.k_proj = linear(config.hidden_size, kv_size, use_bias=bias, axes=("kv_heads", "embed"))
        self.v_proj = linear(config.hidden_size, kv_size, use_bias=bias, axes=("kv_heads", "embed"))
        self.o_proj = linear(q_size, config.hidden_size, use_bias=config.attention_output_bias, axes=("embed", "heads"))
        norm = functools.partial(RMSNorm, config.head_dim, eps=config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.attention = PagedAttention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            cache=cache,
            sliding_window=config.window_of_layer(layer),
            mesh=mesh,
            implementation=implementation,
            rngs=rngs,
        )
        self.head_dim = config.head_dim

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Map x [T, hidden] (or [B, L, hidden]) to the same shape; writes this step's keys and values to the cache."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_proj(x, batch.adapter_ids).reshape(heads)  # [T, H, D]
        k = self.k_proj(x, batch.adapter_ids).reshape(heads)  # [T, KV, D]
        v = self.v_proj(x, batch.adapter_ids).reshape(heads)  # [T, KV, D]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rope(q, batch.cos, batch.sin)
        k = apply_rope(k, batch.cos, batch.sin)
        out = self.attention(
            q, k, v, batch.metadata, positions=batch.positions, segment_ids=batch.segment_ids
        )  # [T, H, D]
        return self.o_proj(out.reshape(*x.shape[:-1], -1), batch.adapter_ids)  # [T, hidden]


class LlamaBlock(nnx.Module):
    """One layer: attention and MLP, each on the normalised stream and added back to it.

    Args:
        config: Hyperparameters.
        layer: Index of the layer.
        dtype: Dtype of the parameters.
        rngs: Source of initial weights.
        **options: `cache`, `mesh` and `implementation`, for the attention.
    """

    def __init__(self, config: LlamaConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs, **options):
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, layer, dtype=dtype, rngs=rngs, **options)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            use_bias=config.mlp_bias,
            initializer_range=config.initializer_range,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Map x [T, hidden] (or [B, L, hidden]) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), batch)
        return x + self.mlp(self.post_attention_layernorm(x), batch.adapter_ids)


class Llama(nnx.Module):
    """A Llama-style decoder, for training and for serving with a paged cache.

        model(tokens, metadata)   # i32[T] -> logits f32[N, vocab]: the ragged batch of a serving step
        model(tokens)             # i32[B, L] -> logits f32[B, L, vocab]: training

    Both forms use the same weights and give the same numbers. Activations have the dtype of the parameters; norms,
    rotary phases, softmax, accumulations and logits are float32.

    Args:
        config: Hyperparameters.
        rngs: Source of initial weights (stream "params").
        dtype: Dtype of the parameters.
        cache: Shape of each layer's cache, or None; `init_cache` gives one later.
        mesh: Device mesh that attention splits its heads over, or None for one device. The parameters are placed by who
            fills them (`load_model`, or `flax_paged.sharding.param_shardings`).
        implementation: Passed to the ops: None chooses by platform.

    Raises:
        ValueError: The cache or mesh does not fit the config.

    Reference: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models".
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        cache: CacheSpec | None = None,
        mesh: Mesh | None = None,
        implementation: str | None = None,
    ):
        self.config = config
        block = functools.partial(
            LlamaBlock, config, dtype=dtype, cache=cache, mesh=mesh, implementation=implementation, rngs=rngs
        )
        options = {"initializer_range": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nnx.List([block(layer) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        head = functools.partial(Linear, config.hidden_size, config.vocab_size, axes=("vocab", "embed"), **options)
        self.lm_head = None if config.tie_word_embeddings else head()

    def __call__(
        self,
        tokens: jax.Array,
        metadata: PagedMetadata | None = None,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        adapter_ids: jax.Array | None = None,
        remat: str | None = None,
    ) -> jax.Array:
        """Return logits.

        Args:
            tokens: i32[T] with metadata, else i32[B, L].
            metadata: The step's ragged batch. The layers write its keys and values to their caches; without caches
                they attend within the batch.
            positions: Dense form only: i32[B, L], by default 0 ... L - 1.
            segment_ids: Dense form only: i32[B, L]; tokens attend within equal ids (packed sequences).
            adapter_ids: i32 of the shape of tokens: each token's adapter, 0 for none, where `stack_lora` has given the
                model several.
            remat: Dense form only: what of each layer the backward pass computes again; None, "dots" or "full" (see
                `flax_paged.nn.remat`).

        Returns:
            With metadata f32[N, vocab], for the rows of `metadata.logits_indices` (by default the last token of each
            of the S sequences; rows of padding sequences mean nothing); else f32[B, L, vocab].

        Raises:
            ValueError: tokens and metadata do not belong together.
        """
        if metadata is None:
            batch = self._dense_batch(tokens, positions, segment_ids)
        elif remat is not None:
            raise ValueError(f"{remat=} belongs to the dense form: with metadata there is no backward pass.")
        else:
            batch = self._paged_batch(tokens, metadata, positions, segment_ids)
        batch = batch._replace(adapter_ids=adapter_ids)
        x = self.embed_tokens(tokens)  # [T, hidden] or [B, L, hidden]
        for layer in self.layers:
            x = call_layer(layer, x, batch, remat=remat)
        if metadata is not None:
            x = x[metadata.logits_rows()]  # [N, hidden]
        return self.logits(self.norm(x))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return f32 logits [..., vocab] of normalised hidden states x [..., hidden]."""
        if self.lm_head is None:
            return self.embed_tokens.attend(x)
        return contract_last(x, self.lm_head.weight[...])

    def init_cache(self, spec: CacheSpec) -> None:
        """Give every layer an empty cache of this shape; `cache_spec_for(model, ...)` makes a fitting spec."""
        init_cache(self, spec)

    def drop_cache(self) -> None:
        """Remove the caches; the model then attends within the batch."""
        drop_cache(self)

    def _paged_batch(self, tokens, metadata: PagedMetadata, positions, segment_ids) -> Batch:
        if tokens.shape != metadata.positions.shape:
            raise ValueError(
                f"tokens has shape {tokens.shape}, metadata.positions {metadata.positions.shape}; expected both [T],"
                " the padded number of tokens of the step."
            )
        if positions is not None or segment_ids is not None:
            raise ValueError("positions and segment_ids belong to the dense form; with metadata, metadata says both.")
        seq_lens = None
        if depends_on_seq_lens(self.config.rope):
            rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            sequence = jnp.searchsorted(metadata.query_start_loc[1:], rows, side="right")
            seq_lens = jnp.take(metadata.seq_lens, sequence, mode="clip")
        cos, sin = self._rope(metadata.positions, seq_lens)
        return Batch(cos, sin, metadata, None, None, None)

    def _dense_batch(self, tokens, positions, segment_ids) -> Batch:
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {tokens.shape}; expected [B, L], or [T] together with metadata.")
        rope_positions = positions
        if rope_positions is None:
            rope_positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        seq_lens = None
        if depends_on_seq_lens(self.config.rope):
            seq_lens = _dense_seq_lens(rope_positions, segment_ids)
        cos, sin = self._rope(rope_positions, seq_lens)
        return Batch(cos, sin, None, positions, segment_ids, None)

    def _rope(self, positions: jax.Array, seq_lens: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return rope_tables(
            self.config.rope,
            positions,
            head_dim=self.config.head_dim,
            max_position_embeddings=self.config.max_position_embeddings,
            seq_lens=seq_lens,
        )


def _dense_seq_lens(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Length of each token's sequence, i32[B, L]: one past the last position in its row, or in its segment."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(positions, axis=1, keepdims=True) + 1, positions.shape)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.max(jnp.where(same, positions[:, None, :], 0), axis=2) + 1
