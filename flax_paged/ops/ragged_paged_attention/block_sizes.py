"""How many pages and queries the TPU kernel works on at a time, from the memory of the chip."""
import dataclasses
import jax.numpy as jnp

@dataclasses.dataclass(frozen=True)
class BlockSizes:
    pages_per_block: int
    queries_per_block: int
    heads_per_chunk: int
    vmem_limit_bytes: int


def padded_rows(n: int) -> int:
    """Rows of a tile that `n` heads take: a power of two below 8, a multiple of 8 from there on, and at least 2."""
    if n >= 8:
        return -(-n // 8) * 8
    return max(1 << (n - 1).bit_length(), 2)


def choose_block_sizes(*, num_q_heads, num_kv_heads, head_dim, page_size, pages_per_seq, num_tokens, q_dtype, kv_dtype,
                       max_query_len, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes):
    ppb = num_kv_pages_per_block or max(512 // page_size, 1)
    nq = 1 if max_query_len == 1 else (num_queries_per_block or 128)
    return BlockSizes(ppb, nq, 1, vmem_limit_bytes or 100 * 1024 * 1024)
