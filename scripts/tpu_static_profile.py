"""Compile the TPU kernels with the real TPU compiler, no TPU needed, and report their static schedule.

    pip install 'jax[tpu]'
    python scripts/tpu_static_profile.py --chips v5e v6e tpu7x --markdown profile.md --json profile.json

Each case is compiled in a fresh process, because the compiler reads its dump options when it is loaded. The report
counts VLIW bundles, which are cycles as long as nothing waits for memory, so the DMA time of the same work stands
beside them: what is at most 1 of it can hide behind it. No number here was measured on hardware.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# HBM bytes a second, cycles a second, flop a cycle of one TensorCore.
CHIPS = {"v5e": (820e9, 1.5e9, 131072), "v6e": (1640e9, 1.75e9, 524288), "tpu7x": (3700e9, 2.2e9, 524288)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel and shape to profile; `kernel` is "ours" or "jax" (the kernel that JAX ships)."""

    kernel: str
    path: str  # "decode" or "prefill"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 128
    context: int = 2048
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Short name for tables."""
        return (
            f"{self.kernel} {self.path} {self.num_q_heads}/{self.num_kv_heads} x {self.head_dim}, page {self.page_size}"
        )


_HEADS = {"32/8 x 128": (32, 8, 128), "32/8 x 64": (32, 8, 64), "9/3 x 64": (9, 3, 64)}
DEFAULT_CASES = (
    *(Case("ours", "decode", *heads, page_size) for heads in _HEADS.values() for page_size in (128, 16)),
    *(Case("ours", "prefill", *heads) for heads in _HEADS.values()),
    Case("jax", "decode"),
)


def main() -> None:
    """Run the cases given on the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument("--case", action="append", type=json.loads, help="JSON object of Case fields; may be repeated")
    parser.add_argument("--markdown", type=pathlib.Path, help="write the table to this file, too")
    parser.add_argument("--json", type=pathlib.Path, help="write all numbers to this file")
    parser.add_argument("--worker", nargs=2, metavar=("CHIP", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        compile_case(args.worker[0], Case(**json.loads(args.worker[1])))
        return
    cases = [Case(**fields) for fields in args.case] if args.case else DEFAULT_CASES
    results = [profile(chip, case) for case in cases for chip in args.chips]
    table = markdown_table(results)
    print(table)
    if args.markdown:
        args.markdown.write_text(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


# --- Compilation, in a process of its own ---


def compile_case(chip: str, case: Case) -> None:
    """Compile one case for one chip; the compiler dumps its schedule where LIBTPU_INIT_ARGS says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    abstract_device = AbstractDevice(
        device_kind=device.device_kind, num_cores=getattr(device, "num_cores", 1), platform="tpu"
    )
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract_device)
    num_seqs = 64
    num_tokens = num_seqs if case.path == "decode" else case.context
    shapes = [
        ((num_tokens, case.num_q_heads, case.head_dim), case.dtype),
        (cache_spec(case).shape, case.dtype),
        ((num_seqs,), jnp.int32),
        ((num_seqs, case.context // case.page_size), jnp.int32),
        ((num_seqs + 1,), jnp.int32),
        ((1,), jnp.int32),
    ]
    sharding = SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(_kernel(case)).lower(*args).compile()


def cache_spec(case: Case):
    """Return the cache that the kernel reads: the one that a TPU gets, or the one that JAX's kernel takes."""
    from flax_paged.cache import CacheSpec

    layout = "tpu" if case.kernel == "ours" else "standard"
    num_pages = 65536 // case.page_size
    return CacheSpec(
        case.num_kv_heads, case.head_dim, num_pages, case.page_size, case.dtype, head_dim_alignment=128, layout=layout
    )


def _kernel(case):
    scale = case.head_dim**-0.5
    if case.kernel == "jax":
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        options = {"num_kv_pages_per_block": max(512 // case.page_size, 1), "num_queries_per_block": 32}
        return functools.partial(ragged_paged_attention, sm_scale=scale, vmem_limit_bytes=64 * 2**20, **options)
    from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

    max_query_len = 1 if case.path == "decode" else None
    return functools.partial(ragged_paged_attention_tpu, sm_scale=scale, max_query_len=max_query_len)


# --- The compiler's dumps ---


def profile(chip: str, case: Case) -> dict:
    """Compile in a fresh process with dumps and return the numbers of the attention kernel."""
    with tempfile.TemporaryDirectory() as dumps:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, __file__, "--worker", chip, json.dumps(dataclasses.asdict(case))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return {"chip": chip, "case": dataclasses.asdict(case), "error": done.stderr.strip().splitlines()[-1][:300]}
        return {"chip": chip, "case": dataclasses.asdict(case), **read_dumps(pathlib.Path(dumps), chip, case)}


def read_dumps(dumps: pathlib.Path, chip: str, case: Case) -> dict:
    """Numbers of the kernel with the most bundles among those that were compiled."""
    names = [p for p in dumps.glob("*-final_bundles.txt") if not re.search("late-|TLP|schedule-analysis", p.name)]
    bundles = max(names, key=lambda p: p.stat().st_size)
    prefix = re.sub(r"-\d+-final_bundles.txt$", "", bundles.name)
    rows = _bundle_rows(bundles)
    units, capacity, uses = _utilization(next(dumps.glob(f"{prefix}-*final_hlo-static-per-bundle-utilization.txt")))
    regions = _regions(rows)
    main = max(regions, key=lambda r: (r["depth"], 0)[1] if r["depth"] < 3 else r["bundles"])
    span = slice(main["start"], main["start"] + main["bundles"])
    busy = collections.Counter()
    for use in uses[span]:
        busy.update(dict(zip(units, use, strict=True)))
    memory = _allocations(next(dumps.glob(f"{prefix}-*-pre-finalize-registers-and-allocations.txt")))
    bandwidth, clock, _ = CHIPS[chip]
    fetched = case.context * cache_spec(case).page_nbytes // case.page_size
    return {
        "bundles": len(rows),
        "main_body_bundles": main["bundles"],
        **_work(regions, chip, case),
        "regions": [r for r in regions if r["bundles"] >= 8],
        "unit_bounds": {unit: round(busy[unit] / n) for unit, n in zip(units, capacity, strict=True)},
        "fills": busy["VLOAD:FILL"],
        "spills": busy["VSTORE:SPILL"],
        **_page_issue(rows, regions, span, busy["SALU"] / dict(zip(units, capacity, strict=True))["SALU"]),
        "vmem_bytes": memory["vmem"],
        "smem_bytes": memory["smem"],
        "bytes_fetched_per_sequence": fetched,
        "dma_cycles_per_sequence": round(fetched / bandwidth * clock),
    }


def _page_issue(rows, regions, span, salu):
    """Page copies started in the main body, and bundles that starting one takes.

    In the body they run beside the vector work, so that only scalar slots count; otherwise a loop starts one a turn.
    """
    starts = sum("dma.hbm_to_vmem" in text for _, text in rows[span])
    if starts:
        return {"page_dma_starts": starts, "bundles_per_page_dma": round(salu / starts, 1)}
    loops = [
        r["bundles"] for r in regions
        if " LB:" in rows[r["start"]][1].partition("{")[0]
        and sum("dma.hbm_to_vmem" in text for _, text in rows[r["start"] : r["start"] + r["bundles"]]) == 1
    ]  # fmt: skip
    return {"page_dma_starts": 0, "bundles_per_page_dma": min(loops, default=None)}


def _work(regions, chip, case):
    """Cycles of the whole work from the regions of our kernel, whose loops nest sequence, item, block, chunk.

    Code that a block runs only once in a while is counted every time, so these are upper bounds.
    """
    if case.kernel != "ours":
        return {}
    blocks = _block_sizes(chip, case)
    depth = {d: [r["bundles"] for r in regions if r["depth"] == d] for d in range(5)}
    tokens = blocks.pages_per_block * case.page_size
    if case.path == "decode":
        cycles = -(-case.context // tokens) * sum(depth[3]) + sum(depth[2]) + sum(depth[1])
        return {"cycles_per_sequence": cycles, "bundles_per_kv_token": round(cycles / case.context, 2)}
    # The last chunk is that of interior blocks, which need no mask; before it comes the unpacking of K and V.
    chunk = [n for n in depth[4] if n > 200][-1]
    unpack = ([n for n in depth[3] if n > 200] or [0])[-1]
    chunks = case.num_q_heads // blocks.heads_per_chunk
    cycles = unpack + chunks * chunk
    flops = 4 * blocks.queries_per_block * tokens * case.head_dim * case.num_q_heads
    return {
        "cycles_per_block": cycles,
        "bundles_per_kv_token": round(cycles / tokens, 2),
        "share_of_mxu_peak": round(flops / cycles / CHIPS[chip][2], 3),
    }


def _block_sizes(chip, case):
    from flax_paged.ops.ragged_paged_attention.block_sizes import Problem, choose_block_sizes

    size = 2 if case.dtype == "bfloat16" else 4
    problem = Problem(
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=-(-case.head_dim // 128) * 128,
        page_size=case.page_size,
        pages_per_seq=case.context // case.page_size,
        num_tokens=64 if case.path == "decode" else case.context,
        q_bytes=size,
        kv_bytes=size,
        decode_only=case.path == "decode",
        is_packed=cache_spec(case).is_packed,
    )
    return choose_block_sizes(problem, generation={"tpu7x": "7x"}.get(chip, chip))


def _bundle_rows(path):
    """(loop depth, text) of each bundle; an empty bundle without depth marks inherits that of the one before."""
    rows, depth = [], 0
    for line in path.read_text().splitlines():
        if not re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
            continue
        head, _, body = line.partition("{")
        if head.count(">") or not body.strip().startswith("}"):
            depth = head.count(">")
        rows.append((depth, line))
    return rows


def _regions(rows):
    """Stretches of bundles of one loop depth, with their spill references."""
    regions = []
    for i, (depth, text) in enumerate(rows):
        if not regions or depth != regions[-1]["depth"] or " LB:" in text.partition("{")[0]:
            regions.append({"depth": depth, "start": i, "bundles": 0, "spill_references": 0})
        regions[-1]["bundles"] += 1
        regions[-1]["spill_references"] += text.count("_spill")
    return regions


def _utilization(path):
    lines = path.read_text().splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    return units, [float(x) for x in lines[2].split()], [[float(x) for x in row.split()] for row in lines[4:] if row]


def _allocations(path):
    total = collections.Counter()
    pattern = re.compile(r"#allocation\d+ \[shape = '[^']*', space=(vmem|smem), size = 0x([0-9a-f]+)")
    for line in path.read_text().splitlines():
        found = pattern.search(line)
        if found and "fixed_abs" not in line:
            total[found[1]] += int(found[2], 16)
    return total


def markdown_table(results: list[dict]) -> str:
    """One row a case and chip."""
    lines = [
        "| kernel | chip | main body, bundles | bound by | bundles a KV token | fills + spills"
        " | page DMA: bundles x starts | VMEM MiB | SMEM KiB | MiB fetched | whole work |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        name = Case(**r["case"]).name
        if "error" in r:
            lines.append(f"| {name} | {r['chip']} | {r['error']} |" + " |" * 8)
            continue
        unit, bound = max(r["unit_bounds"].items(), key=lambda item: item[1])
        in_body = f" x {r['page_dma_starts']}" if r["page_dma_starts"] else " (loop)"
        lines.append(
            f"| {name} | {r['chip']} | {r['main_body_bundles']} | {unit} {bound} | {r.get('bundles_per_kv_token', '')}"
            f" | {r['fills'] + r['spills']:.0f} | {r['bundles_per_page_dma']}{in_body}"
            f" | {r['vmem_bytes'] / 2**20:.1f} | {r['smem_bytes'] / 2**10:.1f}"
            f" | {r['bytes_fetched_per_sequence'] / 2**20:.2f} | {_work_text(r)} |"
        )
    return "\n".join(lines) + "\n"


def _work_text(result):
    if "cycles_per_sequence" in result:
        cycles, dma = result["cycles_per_sequence"], result["dma_cycles_per_sequence"]
        return f"{cycles} of {dma} cycles of DMA a sequence: {cycles / dma:.2f}"
    if "share_of_mxu_peak" in result:
        return f"{result['cycles_per_block']} cycles a block: {result['share_of_mxu_peak']:.0%} of MXU peak"
    return ""


if __name__ == "__main__":
    main()
