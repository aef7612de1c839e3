"""`PagedAttention`, the layer: owns a paged KV cache, writes this step's keys and values to it, attends over it."""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_paged.cache import CacheSpec, KVCache, create_kv_cache
from flax_paged.metadata import PagedMetadata
from flax_paged.ops import kv_cache_update, paged_attention_with_update, ragged_paged_attention
from flax_paged.ops.dense_attention import dense_attention
from flax_paged.sharding import mesh_axis

# Before JAX 0.12, XLA:CPU widens the whole cache to float32 and back to scatter a few 16-bit rows into it.
_SCATTER_WIDENS = jax.__version_info__ < (0, 12)


class PagedAttention(nnx.Module):
    """Attention over a paged KV cache that the layer owns.

    For query token t of sequence i, at position p, with the sequence's keys and values k, v in its pages:

        out[t] = softmax_j(cap(scale * q[t] . k[j])) @ v,   j <= p  and  p - j < sliding_window

    where cap(s) is `soft_cap * tanh(s / soft_cap)` if given. Queries are grouped: head h reads KV head
    `h // (num_heads // num_kv_heads)`. Rotary embedding is applied by the caller.

    With a cache, `layer(q, k, v, metadata)` first writes k and v to the slots of `metadata.slot_mapping`. Without one
    it attends densely among the tokens of the batch, each sequence to itself, which is what training and memory
    profiling need: `layer(q, k, v)` for padded batches `[B, L, heads, head_dim]`, or the ragged form with metadata.

    Args:
        num_heads: Query heads H.
        num_kv_heads: KV heads; must divide `num_heads`.
        head_dim: Size D of a head.
        cache: Shape of the cache, or None (or one of zero pages) for none.
        scale: Factor on the scores; None means `head_dim ** -0.5`.
        sliding_window: Number of keys a query sees, its own included; None for all.
        soft_cap: Bound of the scores through tanh; None for none.
        sinks: Not available yet; must be False.
        alibi_slopes: Not available yet; must be None.
        attention_chunk_size: Not available yet; must be None.
        kv_sharing_source: Not available yet; must be None.
        attention_type: "decoder" (causal); the others are not available yet.
        mesh: Device mesh to split the heads over (axis "tensor"), or None for one device.
        implementation: Passed to the ops: None chooses by platform.
        rngs: Unused while the layer has no parameters of its own.

    Raises:
        ValueError: Sizes that do not fit each other, the cache or the mesh.
        NotImplementedError: A feature that is not available yet.

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
        kv_sharing_source: str | None = None,
        attention_type: Literal["decoder"] = "decoder",
        mesh: Mesh | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        _refuse_unavailable(
            sinks=sinks or None,
            alibi_slopes=alibi_slopes,
            attention_chunk_size=attention_chunk_size,
            kv_sharing_source=kv_sharing_source,
            attention_type=None if attention_type == "decoder" else attention_type,
        )
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
        if mesh is not None:
            _check_heads_divide(num_heads, num_kv_heads, mesh)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.mesh = mesh
        self.implementation = implementation
        self.kv_cache: KVCache | None = nnx.data(None)
        if cache is not None:
            self.init_cache(cache)

    def init_cache(self, spec: CacheSpec) -> None:
        """Give the layer an empty cache of this shape; zero pages means none.

        Raises:
            ValueError: The spec's heads or head_dim are not the layer's.
        """
        expected, got = (self.num_kv_heads, self.head_dim), (spec.num_kv_heads, spec.head_dim)
        if expected != got:
            raise ValueError(f"The cache has (num_kv_heads, head_dim) = {got}, but the layer needs {expected}.")
        if spec.num_pages == 0:
            self.drop_cache()
        elif self.mesh is None:
            self.kv_cache = create_kv_cache(spec)
        else:
            sharding = NamedSharding(self.mesh, self._specs()[1])
            self.kv_cache = KVCache(jnp.zeros(spec.shape, spec.dtype, device=sharding))

    def drop_cache(self) -> None:
        """Remove the cache; the layer then attends within the batch."""
        self.kv_cache = nnx.data(None)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        metadata: PagedMetadata | None = None,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend, after writing k and v to the cache if there is one.

        Args:
            q: [T, H, D] or [T, H * D] with metadata; [B, L, H, D] without.
            k: [T, KV, D] or [T, KV * D]; [B, L, KV, D] without metadata.
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
        k = _split_heads("k", k, num_tokens, self.num_kv_heads, self.head_dim)
        v = _split_heads("v", v, num_tokens, self.num_kv_heads, self.head_dim)
        if self.kv_cache is None:
            out = self._attend_within_batch(heads, k, v, metadata)
        else:
            out = self._attend_paged(heads, k, v, metadata)
        return out.reshape(q.shape)

    def _attend_paged(self, q: jax.Array, k: jax.Array, v: jax.Array, metadata: PagedMetadata) -> jax.Array:
        run = functools.partial(
            _update_and_attend,
            sm_scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            implementation=self.implementation,
        )
        if self.mesh is not None:
            heads, cache = self._specs()
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, cache, PartitionSpec()),
                out_specs=(heads, cache),
                check_vma=False,
            )
        out, kv_pages = run(q, k, v, self.kv_cache[...], metadata)
        self.kv_cache[...] = kv_pages
        return out

    def _attend_dense(self, q, k, v, positions, segment_ids) -> jax.Array:
        return dense_attention(
            q,
            k,
            v,
            sm_scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            segment_ids=segment_ids,
            q_positions=positions,
            kv_positions=positions,
        )

    def _attend_within_batch(self, q: jax.Array, k: jax.Array, v: jax.Array, metadata: PagedMetadata) -> jax.Array:
        rows = jnp.arange(q.shape[0], dtype=jnp.int32)
        num_tokens = metadata.query_start_loc[metadata.num_seqs[0]]
        segment_ids = jnp.searchsorted(metadata.query_start_loc, rows, side="right").astype(jnp.int32)
        out = self._attend_dense(q[None], k[None], v[None], metadata.positions[None], segment_ids[None])[0]
        return jnp.where((rows < num_tokens)[:, None, None], out, jnp.zeros_like(out))

    def _specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        axis = mesh_axis("kv_heads", self.mesh)
        return PartitionSpec(None, axis, None), PartitionSpec(None, None, axis, None)


def init_cache(module: nnx.Module, spec: CacheSpec) -> None:
    """Give every `PagedAttention` of a module an empty cache of this shape.

    Raises:
        ValueError: The module has no such layer, or the spec does not fit one.
    """
    for layer in _attention_layers(module):
        layer.init_cache(spec)


def drop_cache(module: nnx.Module) -> None:
    """Remove the cache of every `PagedAttention` of a module."""
    for layer in _attention_layers(module):
        layer.drop_cache()


def cache_spec_for(module: nnx.Module, *, num_pages: int, page_size: int, dtype: Any = None) -> CacheSpec:
    """Return the spec of the cache that each `PagedAttention` of a module needs.

    Args:
        module: A module with `PagedAttention` layers.
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        dtype: Cache dtype; None means that of the module's floating-point parameters (float32 on a CPU with JAX
            before 0.12, which cannot update a 16-bit cache in place).

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
    return CacheSpec(num_kv_heads, head_dim, num_pages, page_size, dtype)


def _attention_layers(module: nnx.Module) -> Iterator[PagedAttention]:
    layers = [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, PagedAttention)]
    if not layers:
        raise ValueError(f"{type(module).__name__} has no PagedAttention layer, so there is no cache to make or drop.")
    yield from layers


def _update_and_attend(q, k, v, kv_pages, metadata: PagedMetadata, **options):
    """Write k and v, then attend; one device's share of the heads. Returns (out, kv_pages)."""
    update = (metadata.slot_mapping, metadata.num_kv_update_slices)
    batch = (metadata.seq_lens, metadata.block_tables, metadata.query_start_loc, metadata.num_seqs)
    options["max_query_len"] = metadata.max_query_len
    slices_in_flight = metadata.num_slices_per_kv_cache_update_block
    if slices_in_flight is None:
        return paged_attention_with_update(q, k, v, kv_pages, *update, *batch, **options)
    # Asking for a number of slices in flight asks for the update kernel that has them.
    kv_pages = kv_cache_update(
        kv_pages,
        k,
        v,
        *update,
        num_slices_per_kv_cache_update_block=slices_in_flight,
        implementation=options["implementation"],
    )
    return ragged_paged_attention(q, kv_pages, *batch, **options), kv_pages


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


def _refuse_unavailable(**features: Any) -> None:
    for name, value in features.items():
        if value is not None:
            raise NotImplementedError(f"PagedAttention({name}={value!r}) is not available yet; leave {name} out.")
