"""How many pages and queries the TPU kernel works on at a time: policy in plain integers, no arrays.

The defaults come from the compiler's static schedule (docs/kernels.md), not from measurements on hardware; `TUNED` is
where measured block sizes belong.
"""

import dataclasses
import math

_MIB = 1024 * 1024
_NUM_LANES = 128

# VMEM that one kernel may take, by TPU generation: what the core has, less room for what XLA keeps there.
VMEM_BUDGET = {
    "v4": 14 * _MIB,
    "v5e": 64 * _MIB,
    "v5p": 40 * _MIB,
    "v6e": 64 * _MIB,
    "7x": 40 * _MIB,
}
# What to assume where the generation is unknown (interpret mode): the smallest that is not v4's.
DEFAULT_VMEM_BUDGET = 40 * _MIB
# SMEM of every generation is 1 MiB; the compiler needs some of it.
SMEM_BUDGET = 768 * 1024
# The compiler's own VMEM: spilled registers, and values of the prefill path that do not fit in registers.
_COMPILER_VMEM = 2 * _MIB

# Measured block sizes: (generation, num_q_heads, num_kv_heads, head_dim, page_size) -> (pages, queries) a block.
TUNED: dict[tuple[str, int, int, int, int], tuple[int, int]] = {}

# Bytes of K and V that one block of pages aims at. Larger blocks hide more latency and waste more of short contexts.
_BLOCK_BYTES = {1: 2 * _MIB, 2: 4 * _MIB, 4: 2 * _MIB}
# The 7x moves memory so fast that the fixed cost of a block shows.
_BLOCK_BYTES_7X = {1: 4 * _MIB, 2: 8 * _MIB, 4: 2 * _MIB}
_PREFILL_TOKENS = 512
# Rows of queries in one matrix product: more of them hide the latencies of one another, and make more code. A float32
# product is six passes.
_CHUNK_ROWS = {2: 1024, 4: 256}
_PREFILL_ROWS = 1024  # of one KV head: its query heads times the queries
_MAX_QUERIES = 256
_EDGE_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of one compilation of the kernel.

    Args:
        pages_per_block: Pages fetched at a time.
        queries_per_block: Queries of one sequence that share a fetch; 1 where only the decode path is compiled.
        heads_per_chunk: Query heads that the prefill path puts through one matrix product.
        edge_chunk: Tokens of a partly live block that the decode path handles at a time.
        vmem_bytes: VMEM that the kernel's buffers take.
        vmem_limit_bytes: VMEM that the compiler may use.
    """

    pages_per_block: int
    queries_per_block: int
    heads_per_chunk: int
    edge_chunk: int
    vmem_bytes: int
    vmem_limit_bytes: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shape that block sizes are chosen for; sizes of types in bytes.

    `head_dim` is the number of lanes of a row in the cache, which K and V share if `is_packed`.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    num_tokens: int
    q_bytes: int
    kv_bytes: int
    decode_only: bool
    max_query_len: int | None = None
    is_packed: bool = False
    has_kv_scales: bool = False

    @property
    def num_q_rows(self) -> int:
        """Query heads, padded to whole tiles."""
        return padded_rows(self.num_q_heads)

    @property
    def token_nbytes(self) -> int:
        """Bytes of the K and V of one token."""
        return self.num_kv_heads * (1 if self.is_packed else 2) * self.head_dim * self.kv_bytes

    @property
    def page_unit(self) -> int:
        """Fewest pages whose keys fill whole vector registers, which every block is a multiple of.

        The decode path lines up the keys of all KV heads, the prefill path those of one.
        """
        rows = self.page_size * (self.num_kv_heads if self.decode_only else 1)
        return _NUM_LANES // math.gcd(rows, _NUM_LANES)


def padded_rows(n: int) -> int:
    """Rows that `n` heads take in a tiled buffer: a power of two from 2 to 8, from there on a multiple of 8."""
    return -(-n // 8) * 8 if n >= 8 else max(1 << (n - 1).bit_length(), 2)


def whole_rows(n: int) -> int:
    """Rows of `n` heads that fill vector registers."""
    return -(-n // 8) * 8


def vmem_bytes(problem: Problem, pages_per_block: int, queries_per_block: int) -> int:
    """Bytes of VMEM that the kernel's buffers take (`Refs` in tpu_pipeline.py), without the compiler's own."""
    p = problem
    tokens = pages_per_block * p.page_size
    compute_bytes = max(p.q_bytes, p.kv_bytes)
    total = 2 * tokens * p.token_nbytes
    total += 5 * queries_per_block * p.num_q_rows * p.head_dim * p.q_bytes
    total += tokens * p.num_kv_heads * (p.num_q_rows * 4 + p.head_dim * p.kv_bytes)
    if p.has_kv_scales:  # two buffers of K's and V's, V's of a block, both by head
        total += tokens * (p.num_kv_heads * 5 + (0 if p.decode_only else 2 * whole_rows(p.num_kv_heads))) * 4
    if not p.decode_only:
        rows = p.num_q_heads * queries_per_block
        total += rows * (p.head_dim * compute_bytes + (2 * _NUM_LANES + p.head_dim) * 4)
        total += (1 if p.is_packed else 2) * p.num_kv_heads * tokens * p.head_dim * compute_bytes
    return total


def smem_bytes(problem: Problem, max_num_seqs: int, num_mask_words: int = 0) -> int:
    """Bytes of SMEM: the page ids of two sequences, and the lengths and page masks of all."""
    table = 2 * -(-problem.pages_per_seq // _NUM_LANES) * _NUM_LANES * 4
    return table + 2 * (max_num_seqs + 1) * 4 + max_num_seqs * num_mask_words * 4


def choose_block_sizes(
    problem: Problem,
    *,
    generation: str | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> BlockSizes:
    """Return block sizes that fit the chip.

    Args:
        problem: The static shape.
        generation: "v4", "v5e", "v5p", "v6e" or "7x"; None where it is unknown.
        num_kv_pages_per_block: Overrides the choice; rounded up to a multiple of `problem.page_unit`.
        num_queries_per_block: Overrides the choice; rounded up to a multiple of 16.
        vmem_limit_bytes: Overrides the generation's budget.

    Raises:
        ValueError: The buffers do not fit the budget, whatever the block sizes that were left to choose.
    """
    limit = vmem_limit_bytes or VMEM_BUDGET.get(generation, DEFAULT_VMEM_BUDGET)
    budget = limit - _COMPILER_VMEM
    key = (generation, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size)
    tuned_pages, tuned_queries = TUNED.get(key, (None, None))
    pages = num_kv_pages_per_block or tuned_pages or _default_pages(problem, generation)
    pages = -(-pages // problem.page_unit) * problem.page_unit
    queries = 1
    if not problem.decode_only:
        queries = -(-(num_queries_per_block or tuned_queries or _default_queries(problem)) // 16) * 16

    fewest_queries = 8 if min(problem.q_bytes, problem.kv_bytes) == 4 else 16  # rows of a tile
    while vmem_bytes(problem, pages, queries) > budget:
        if queries > 16 and not num_queries_per_block and (queries > 64 or num_kv_pages_per_block):
            queries = queries // 2 // 16 * 16
        elif pages > problem.page_unit and not num_kv_pages_per_block:
            pages = pages // 2 // problem.page_unit * problem.page_unit
        elif queries > fewest_queries and not num_queries_per_block:
            queries = queries // 2 // fewest_queries * fewest_queries
        else:
            raise ValueError(
                f"The kernel's buffers take {vmem_bytes(problem, pages, queries)} bytes of VMEM with {pages} pages and"
                f" {queries} queries a block; {budget} bytes are left of the limit of {limit}. Lower"
                " num_kv_pages_per_block or num_queries_per_block, or raise vmem_limit_bytes."
            )
    return BlockSizes(
        pages_per_block=pages,
        queries_per_block=queries,
        heads_per_chunk=_heads_per_chunk(problem, queries),
        edge_chunk=_edge_chunk(problem, pages * problem.page_size),
        vmem_bytes=vmem_bytes(problem, pages, queries),
        vmem_limit_bytes=limit,
    )


def _default_pages(problem, generation):
    # Packed rows count twice: they are as much work as a row of K and one of V.
    token_bytes = 2 * problem.num_kv_heads * problem.head_dim * problem.kv_bytes
    block_bytes = _BLOCK_BYTES_7X if generation == "7x" else _BLOCK_BYTES
    tokens = max(block_bytes[problem.kv_bytes] // token_bytes, 1)
    if not problem.decode_only:
        tokens = min(tokens, _PREFILL_TOKENS)
    # No larger than the longest sequence, and a power of two of pages so that long contexts divide evenly.
    tokens = min(tokens, problem.pages_per_seq * problem.page_size)
    return max(1 << max(tokens // problem.page_size, 1).bit_length() - 1, 1)


def _default_queries(problem):
    longest = min(problem.num_tokens, problem.max_query_len or problem.num_tokens)
    queries = _PREFILL_ROWS // max(problem.num_q_heads // problem.num_kv_heads, 1)
    return max(min(queries, _MAX_QUERIES, 1 << max(longest - 1, 1).bit_length()), 16)


def _heads_per_chunk(problem, queries):
    """Query heads of a KV head in one product, so that short query blocks still fill the matrix unit."""
    heads = problem.num_q_heads // problem.num_kv_heads
    rows = _CHUNK_ROWS[max(problem.q_bytes, problem.kv_bytes)] * _NUM_LANES // problem.head_dim
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * queries <= rows))


def _edge_chunk(problem, tokens):
    """The divisor of a block that is nearest to the wanted size and fills whole registers."""
    rows = problem.num_kv_heads
    sizes = [n for n in range(2, tokens + 1, 2) if tokens % n == 0 and n * rows % _NUM_LANES == 0 and n % 8 == 0]
    return min(sizes or [tokens], key=lambda n: abs(n - _EDGE_TOKENS))
