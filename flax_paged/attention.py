"""`PagedAttention`, the layer: owns a paged KV cache, writes this step's keys and values to it, attends over it."""

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_paged.cache import CacheSpec, KVCache, KVScale
from flax_paged.metadata import PagedMetadata
from flax_paged.ops import (
    cascade_attention,
    kv_cache_update,
    kv_scales_update,
    paged_attention_with_update,
    ragged_paged_attention,
)
from flax_paged.ops.dense_attention import dense_attention
from flax_paged.ops.quantization import quantize_per_head
from flax_paged.ops.scales_layout import are_lines
from flax_paged.sharding import mesh_axis

# Before JAX 0.12, XLA:CPU widens the whole cache to float32 and back to scatter a few 16-bit rows into it.
_SCATTER_WIDENS = jax.__version_info__ < (0, 12)


class PagedAttention(nnx.Module):
    """Attention over a paged KV cache that the layer owns.

    For query token t of sequence i, at position p, with the sequence's keys and values k, v in its pages:

        out[t] = softmax_j(cap(scale * q[t] . k[j]) - alibi_slope * |p - j|) @ v,   j <= p  and  p - j < sliding_window

    where cap(s) is `soft_cap * tanh(s / soft_cap)` if given. Queries are grouped: head h reads KV head
    `h // (num_heads // num_kv_heads)`. Rotary embedding is applied by the caller.

    With a cache, `layer(q, k, v, metadata)` first writes k and v to the slots of `metadata.slot_mapping`. Without one
    it attends densely among the tokens of the batch, each sequence to itself, which is what training and memory
    profiling need: `layer(q, k, v)` for padded batches `[B, L, heads, head_dim]`, or the ragged form with metadata.

    Where metadata has `num_shared_pages`, a layer reads the pages that all sequences begin with once for all of them
    (cascade attention). A layer with a sliding window, chunks or ALiBi, or that is not causal, reads them for each.

    Args:
        num_heads: Query heads H.
        num_kv_heads: KV heads; must divide `num_heads`.
        head_dim: Size D of a head.
        cache: Shape of the cache, or None (or one of zero pages) for none.
        scale: Factor on the scores; None means `head_dim ** -0.5`.
        sliding_window: Number of keys a query sees, its own included; None for all.
        soft_cap: Bound of the scores through tanh; None for none.
        sinks: Whether each head has a sink, a parameter: one more logit in its softmax, without a value (gpt-oss).
        alibi_slopes: ALiBi slope of each head, numbers; None for none.
        attention_chunk_size: A query sees keys of its own chunk of this many only (Llama 4); None for all.
        kv_sharing_source: An earlier layer whose cache this one reads and never writes; its k and v are then those that
            the source got (`k` and `v` may be None in the paged form). None for a cache of its own.
        attention_type: "decoder" is causal; in "encoder" every token sees all tokens of its sequence; in
            "encoder_decoder" queries see another sequence's keys (cross attention), which `build_cross_metadata`
            describes.
        mesh: Device mesh to split the heads over (axis "tensor"), or None for one device.
        implementation: Passed to the ops: None chooses by platform.
        rngs: Unused: sinks start at zero.

    Raises:
        ValueError: Sizes that do not fit each other, the cache or the mesh, or features that mean nothing together.

    Reference: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        cache: CacheSpec | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        alibi_slopes: Any = None,
        attention_chunk_size: int | None = None,
        kv_sharing_source: "PagedAttention | None" = None,
        attention_type: Literal["decoder", "encoder", "encoder_decoder"] = "decoder",
        mesh: Mesh | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"PagedAttention({name}={value}): expected at least 1.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads=} is not a multiple of {num_kv_heads=}; each KV head serves as many query heads."
            )
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"{sliding_window=}: expected at least 1 (the token itself), or None for no window.")
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"{soft_cap=}: expected a positive number, or None for no cap.")
        if attention_chunk_size is not None and attention_chunk_size < 1:
            raise ValueError(f"{attention_chunk_size=}: expected at least 1, or None for no chunks.")
        if attention_type not in ("decoder", "encoder", "encoder_decoder"):
            raise ValueError(f"{attention_type=}: expected 'decoder', 'encoder' or 'encoder_decoder'.")
        if mesh is not None:
            _check_heads_divide(num_heads, num_kv_heads, mesh)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.attention_chunk_size = attention_chunk_size
        self.attention_type = attention_type
        self.alibi_slopes = None if alibi_slopes is None else tuple(map(float, alibi_slopes))
        self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32), logical_axes=("heads",)) if sinks else None
        self.mesh = mesh
        self.implementation = implementation
        self.kv_sharing_source = kv_sharing_source
        self._check_features()
        self.k_scale: KVScale | None = nnx.data(None)
        self.v_scale: KVScale | None = nnx.data(None)
        self.drop_cache()
        if cache is not None:
            self.init_cache(cache)

    def _check_features(self) -> None:
        """Refuse what means nothing together."""
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes has {len(self.alibi_slopes)} numbers: expected num_heads={self.num_heads}.")
        if self.attention_type == "encoder_decoder":
            for name in ("sliding_window", "attention_chunk_size", "alibi_slopes"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} with attention_type='encoder_decoder': there is no distance between a query and a key"
                        " of another sequence; leave it out."
                    )
        source = self.kv_sharing_source
        if source is None:
            return
        if not isinstance(source, PagedAttention):
            raise ValueError(f"kv_sharing_source={type(source).__name__}: expected the PagedAttention layer itself.")
        if source.kv_sharing_source is not None:
            raise ValueError("kv_sharing_source shares another layer's cache itself: give the layer that owns it.")
        theirs, ours = (source.num_kv_heads, source.head_dim), (self.num_kv_heads, self.head_dim)
        if theirs != ours:
            raise ValueError(f"kv_sharing_source has (num_kv_heads, head_dim) = {theirs}, but this layer {ours}.")

    def init_cache(self, spec: CacheSpec) -> None:
        """Give the layer an empty cache of this shape; zero pages means none. Scales that it has already are kept.

        Raises:
            ValueError: The spec's heads or head_dim are not the layer's, or the layer shares another's cache.
        """
        if self.kv_sharing_source is not None:
            raise ValueError("The layer shares the cache of its kv_sharing_source: give that layer a cache.")
        expected, got = (self.num_kv_heads, self.head_dim), (spec.num_kv_heads, spec.head_dim)
        if expected != got:
            raise ValueError(f"The cache has (num_kv_heads, head_dim) = {got}, but the layer needs {expected}.")
        self.drop_cache()
        if spec.num_pages == 0:
            return
        axis = None if self.mesh is None else mesh_axis("kv_heads", self.mesh)

        def zeros(shape, dtype, heads_axis):
            if self.mesh is None:
                return jnp.zeros(shape, dtype)
            spec = PartitionSpec(*(axis if i == heads_axis else None for i in range(len(shape))))
            return jnp.zeros(shape, dtype, device=NamedSharding(self.mesh, spec))

        self.kv_cache = KVCache(zeros(spec.shape, spec.dtype, 2))
        if spec.scales == "per_token_head":
            shape = spec.scales_shape_for(1 if axis is None else self.mesh.shape[axis])
            # Each device's lines hold its own heads, in their own order.
            self.kv_scales = KVCache(zeros(shape, jnp.float32, _scales_axis(shape)))
        if spec.scales != "per_head":
            self.k_scale = self.v_scale = nnx.data(None)
        elif self.k_scale is None:
            self.k_scale, self.v_scale = (KVScale(zeros((spec.num_kv_heads,), jnp.float32, 0) + 1.0) for _ in range(2))

    def drop_cache(self) -> None:
        """Remove the cache; the layer then attends within the batch. Calibrated scales stay for the next cache."""
        self.kv_cache: KVCache | None = nnx.data(None)
        self.kv_scales: KVCache | None = nnx.data(None)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        metadata: PagedMetadata | None = None,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend, after writing k and v to the cache if there is one.

        Args:
            q: [T, H, D] or [T, H * D] with metadata; [B, L, H, D] without.
            k: [T, KV, D] or [T, KV * D]; [B, L, KV, D] without metadata. In cross attention any number of rows. None to
                write nothing: where another layer's cache is shared, or another sequence's keys are there already.
            v: Like k.
            metadata: The step's ragged batch, or None for the dense form.
            positions: Dense form only: i32[B, L], by default 0 ... L - 1 in each row.
            segment_ids: Dense form only: i32[B, L]; tokens attend within equal ids (packed sequences).

        Returns:
            The attention output in q's form and dtype; padding rows are zeros.

        Raises:
            ValueError: Shapes that do not fit, or arguments of one form used in the other.
        """
        if metadata is None:
            if q.ndim != 4:
                raise ValueError(
                    f"q has shape {q.shape}; without metadata expected [B, L, {self.num_heads}, {self.head_dim}]."
                )
            return self._attend_dense(q, k, v, positions, segment_ids)
        if positions is not None or segment_ids is not None:
            raise ValueError("positions and segment_ids belong to the dense form; with metadata, metadata says both.")
        num_tokens = metadata.positions.shape[0]
        heads = _split_heads("q", q, num_tokens, self.num_heads, self.head_dim)
        if k is not None:
            num_keys = k.shape[0] if self.attention_type == "encoder_decoder" else num_tokens
            k = _split_heads("k", k, num_keys, self.num_kv_heads, self.head_dim)
            v = _split_heads("v", v, num_keys, self.num_kv_heads, self.head_dim)
        owner = self if self.kv_sharing_source is None else self.kv_sharing_source
        if owner.kv_cache is not None:
            out = self._attend_paged(heads, k if owner is self else None, v, metadata, owner)
        elif k is None:
            raise ValueError("k is None, but there is no cache that holds keys: call init_cache, or give k and v.")
        else:
            out = self._attend_within_batch(heads, k, v, metadata)
        return out.reshape(q.shape)

    def _attend_paged(self, q, k, v, metadata: PagedMetadata, owner: "PagedAttention") -> jax.Array:
        if k is None and self.attention_type != "encoder_decoder" and owner is self:
            raise ValueError("k is None, but the layer has a cache of its own, into which the step's keys are written.")
        per_head = {"sinks": self.sinks, "k_scale": owner.k_scale, "v_scale": owner.v_scale}
        per_head = {name: variable[...] for name, variable in per_head.items() if variable is not None}
        if self.alibi_slopes is not None:
            per_head["alibi_slopes"] = jnp.asarray(self.alibi_slopes, jnp.float32)
        new = None if k is None else (k, v)
        kv_scales = None if owner.kv_scales is None else owner.kv_scales[...]
        run = functools.partial(
            _update_and_attend,
            sm_scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            attention_chunk_size=self.attention_chunk_size,
            causal=self.attention_type == "decoder",
            implementation=self.implementation,
        )
        if self.mesh is not None:
            axis = mesh_axis("kv_heads", self.mesh)
            lines = 2 if kv_scales is None else _scales_axis(kv_scales.shape)
            heads, cache, token_scales, scales = (PartitionSpec(*[None] * n, axis) for n in (1, 2, lines, 0))
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(heads, heads, cache, token_scales, scales, PartitionSpec()),
                out_specs=(heads, cache, token_scales),
                check_vma=False,
            )
        out, kv_pages, kv_scales = run(q, new, owner.kv_cache[...], kv_scales, per_head, metadata)
        if new is not None:
            owner.kv_cache[...] = kv_pages
            if kv_scales is not None:
                owner.kv_scales[...] = kv_scales
        return out

    def _attend_dense(self, q, k, v, positions, segment_ids) -> jax.Array:
        per_head = {}
        if self.sinks is not None:
            per_head["sinks"] = self.sinks[...]
        if self.alibi_slopes is not None:
            per_head["alibi_slopes"] = jnp.asarray(self.alibi_slopes, jnp.float32)

        def run(q, k, v, per_head, positions, segment_ids):
            return dense_attention(
                q,
                k,
                v,
                sm_scale=self.scale,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                attention_chunk_size=self.attention_chunk_size,
                causal=self.attention_type == "decoder",
                segment_ids=segment_ids,
                q_positions=positions,
                kv_positions=positions,
                implementation="xla" if self.implementation in ("xla", "reference") else None,
                **per_head,
            )

        if self.mesh is not None:
            # A kernel is not split by itself: heads go over their axis, rows over the others where they divide.
            axis = mesh_axis("kv_heads", self.mesh)
            others = tuple(name for name in self.mesh.axis_names if name != axis)
            rows = others if q.shape[0] % math.prod(self.mesh.shape[name] for name in others) == 0 else None
            heads = PartitionSpec(rows, None, axis)
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, PartitionSpec(axis), PartitionSpec(rows), PartitionSpec(rows)),
                out_specs=heads,
                check_vma=False,
            )
        return run(q, k, v, per_head, positions, segment_ids)

    def _attend_within_batch(self, q: jax.Array, k: jax.Array, v: jax.Array, metadata: PagedMetadata) -> jax.Array:
        if self.attention_type == "encoder_decoder":
            raise ValueError("Cross attention over a ragged batch needs a cache; without one use the dense form.")
        rows = jnp.arange(q.shape[0], dtype=jnp.int32)
        num_tokens = metadata.query_start_loc[metadata.num_seqs[0]]
        segment_ids = jnp.searchsorted(metadata.query_start_loc, rows, side="right").astype(jnp.int32)
        out = self._attend_dense(q[None], k[None], v[None], metadata.positions[None], segment_ids[None])[0]
        return jnp.where((rows < num_tokens)[:, None, None], out, jnp.zeros_like(out))


def init_cache(module: nnx.Module, spec: CacheSpec) -> None:
    """Give every `PagedAttention` of a module an empty cache of this shape, save those that share another's.

    Raises:
        ValueError: The module has no such layer, or the spec does not fit one.
    """
    for layer in _attention_layers(module):
        if layer.kv_sharing_source is None:
            layer.init_cache(spec)


def drop_cache(module: nnx.Module) -> None:
    """Remove the cache of every `PagedAttention` of a module."""
    for layer in _attention_layers(module):
        layer.drop_cache()


def num_caches(module: nnx.Module) -> int:
    """Return how many layers of a module have a cache of their own, once `init_cache` gives it them."""
    return sum(layer.kv_sharing_source is None for layer in _attention_layers(module))


def cache_spec_for(
    module: nnx.Module, *, num_pages: int, page_size: int, dtype: Any = None, scales: str | None = None
) -> CacheSpec:
    """Return the spec of the cache that each `PagedAttention` of a module needs.

    Args:
        module: A module with `PagedAttention` layers.
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        dtype: Cache dtype; None means that of the module's floating-point parameters (float32 on a CPU with JAX
            before 0.12, which cannot update a 16-bit cache in place).
        scales: Of an int8 or float8 cache, as in `CacheSpec`.

    Returns:
        A CacheSpec that `init_cache(module, spec)` takes.

    Raises:
        ValueError: The module has no such layer, or its layers differ in heads or head_dim.
    """
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in _attention_layers(module)}
    if len(shapes) > 1:
        raise ValueError(
            f"The attention layers differ in (num_kv_heads, head_dim): {sorted(shapes)}; give each its own."
        )
    (num_kv_heads, head_dim) = shapes.pop()
    if dtype is None:
        params = jax.tree.leaves(nnx.state(module, nnx.Param))
        dtype = next((x.dtype for x in params if jnp.issubdtype(x.dtype, jnp.floating)), jnp.float32)
        if _SCATTER_WIDENS and jax.default_backend() == "cpu":
            dtype = jnp.float32
    return CacheSpec(num_kv_heads, head_dim, num_pages, page_size, dtype, scales=scales)


def _attention_layers(module: nnx.Module) -> Iterator[PagedAttention]:
    layers = [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, PagedAttention)]
    if not layers:
        raise ValueError(f"{type(module).__name__} has no PagedAttention layer, so there is no cache to make or drop.")
    yield from layers


def _update_and_attend(q, new, kv_pages, kv_scales, per_head, metadata: PagedMetadata, **options):
    """Write new keys and values, if any, then attend; one device's share of the heads.

    Returns:
        The result, the pages and their scales.
    """
    update = (metadata.slot_mapping, metadata.num_kv_update_slices)
    batch = (metadata.seq_lens, metadata.block_tables, metadata.query_start_loc, metadata.num_seqs)
    options |= {"max_query_len": metadata.max_query_len, **per_head}
    slices_in_flight = metadata.num_slices_per_kv_cache_update_block
    # A prefix has no single distance to the queries of several sequences; layers that need one read it for each.
    is_cascade = metadata.num_shared_pages is not None and options["causal"]
    is_cascade &= all(options.get(name) is None for name in ("sliding_window", "attention_chunk_size", "alibi_slopes"))
    if new is not None and kv_scales is not None:
        (k, k_scale), (v, v_scale) = (quantize_per_head(x, kv_pages.dtype) for x in new)
        kv_scales = kv_scales_update(kv_scales, k_scale, v_scale, *update, implementation=options["implementation"])
        new = k, v
    options |= {"kv_scales": kv_scales}
    if new is not None and slices_in_flight is None and not is_cascade:
        out, kv_pages = paged_attention_with_update(q, *new, kv_pages, *update, *batch, **options)
        return out, kv_pages, kv_scales
    if new is not None:
        # Asking for a number of slices in flight asks for the update kernel that has them.
        write = functools.partial(
            kv_cache_update,
            num_slices_per_kv_cache_update_block=slices_in_flight,
            implementation=options["implementation"],
        )
        scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
        kv_pages = write(kv_pages, *new, *update, **scales)
    if is_cascade:
        del options["causal"]  # the cascade says itself which part is
        out = cascade_attention(q, kv_pages, *batch, metadata.num_shared_pages, **options)
    else:
        out = ragged_paged_attention(q, kv_pages, *batch, **options)
    return out, kv_pages, kv_scales


def _scales_axis(shape: tuple[int, ...]) -> int:
    """Dimension of the scales of tokens and heads that is split over devices with the heads."""
    return 1 if are_lines(shape) else 2


def _split_heads(name: str, x: jax.Array, num_tokens: int, num_heads: int, head_dim: int) -> jax.Array:
    if x.shape not in ((num_tokens, num_heads, head_dim), (num_tokens, num_heads * head_dim)):
        raise ValueError(
            f"{name} has shape {x.shape}; expected [{num_tokens}, {num_heads}, {head_dim}] or"
            f" [{num_tokens}, {num_heads * head_dim}], {num_tokens} being the metadata's padded number of tokens."
        )
    return x.reshape(num_tokens, num_heads, head_dim)


def _check_heads_divide(num_heads: int, num_kv_heads: int, mesh: Mesh) -> None:
    axis = mesh_axis("kv_heads", mesh)
    if axis is not None and num_kv_heads % mesh.shape[axis]:
        raise ValueError(
            f"{num_kv_heads=} (and {num_heads=}) cannot be split over the {mesh.shape[axis]} devices of mesh axis"
            f" {axis!r}; use a mesh whose {axis!r} axis divides the KV heads."
        )
