"""Write the support table of docs/features.md, from what the code accepts.

`python scripts/feature_table.py` prints the table; `--write` puts it into the page. Each cell is found by tracing the
operation with these arguments, without running it.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from flax_paged.ops import ragged_paged_attention, to_tpu_layout
from flax_paged.ops.scales_layout import to_scale_lines

PAGE = Path(__file__).resolve().parent.parent / "docs" / "features.md"
BEGIN, END = "<!-- table: scripts/feature_table.py --write -->", "<!-- end of table -->"

T, S, P, H, KV, D, NUM_PAGES, PAGE_SIZE = 8, 2, 2, 16, 8, 128, 4, 16
IMPLEMENTATIONS = {"reference": "reference", "xla": "xla", "Pallas TPU": "pallas_tpu_interpret"}


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Name of the feature -> static options, traced options.
FEATURES = {
    "causal, grouped queries": ({}, {}),
    "sliding window (`sliding_window`)": ({"sliding_window": 5}, {}),
    "soft cap (`soft_cap`)": ({"soft_cap": 20.0}, {}),
    "ALiBi (`alibi_slopes`)": ({}, {"alibi_slopes": _f32(H)}),
    "attention sinks (`sinks`)": ({}, {"sinks": _f32(H)}),
    "chunked local attention (`attention_chunk_size`)": ({"attention_chunk_size": 8}, {}),
    "encoder, cross attention (`causal=False`)": ({"causal": False}, {}),
    "block-sparse by page (`page_mask`)": ({}, {"page_mask": jax.ShapeDtypeStruct((S, P), jnp.bool_)}),
    "tree of drafts (`draft_mask`)": ({}, {"draft_mask": _i32(T, 1)}),
    "scales per tensor or head (`k_scale`, `v_scale`)": ({}, {"k_scale": _f32(), "v_scale": _f32(KV)}),
    "scales per token and head (`kv_scales`)": ({}, {"kv_scales": _f32(NUM_PAGES, PAGE_SIZE, 2 * KV, 1)}),
    "log-sum-exp (`return_lse`; `merge_attention`, `cascade_attention`)": ({"return_lse": True}, {}),
    "quantised result (`out_dtype`, `out_scale`)": ({"out_dtype": jnp.int8}, {"out_scale": _f32()}),
}
CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def accepts(implementation: str, cache_dtype, static: dict, traced: dict) -> bool:
    """Whether the operation takes these arguments, bfloat16 queries over pages of `cache_dtype`."""
    arguments = (
        jax.ShapeDtypeStruct((T, H, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((NUM_PAGES, PAGE_SIZE, 2 * KV, D), cache_dtype),
        _i32(S), _i32(S, P), _i32(S + 1), _i32(1),
    )  # fmt: skip

    def run(arguments, traced):
        q, kv_pages, *rest = arguments
        if implementation.startswith("pallas"):  # what a TPU's cache has
            kv_pages = to_tpu_layout(kv_pages, D)
            if "kv_scales" in traced:
                traced = traced | {"kv_scales": to_scale_lines(traced["kv_scales"])}
        return ragged_paged_attention(q, kv_pages, *rest, **static, **traced, implementation=implementation)

    try:
        jax.eval_shape(run, arguments, traced)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return True


def table() -> str:
    """Return the two tables in Markdown."""
    columns = list(IMPLEMENTATIONS)
    lines = ["| feature | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, (static, traced) in FEATURES.items():
        dtype = jnp.int8 if "kv_scales" in traced else jnp.bfloat16
        cells = [_cell(accepts(IMPLEMENTATIONS[column], dtype, static, traced)) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| cache dtype | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for dtype in CACHE_DTYPES:
        cells = [_cell(accepts(IMPLEMENTATIONS[column], dtype, {}, {})) for column in columns]
        lines.append(f"| {jnp.dtype(dtype).name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(is_accepted: bool) -> str:
    return "yes" if is_accepted else "no"


def main(argv: list[str] | None = None) -> int:
    """Print the table, or write it into the page; returns the exit status."""
    parser = argparse.ArgumentParser(description="The support table of docs/features.md.")
    parser.add_argument("--write", action="store_true", help="put it into docs/features.md")
    if not parser.parse_args(argv).write:
        print(table())
        return 0
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
