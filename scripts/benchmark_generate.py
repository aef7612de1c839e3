"""Tokens per second of prefill and decode, beside transformers when it is installed.

`python scripts/benchmark_generate.py --model smollm2 --json-file result.json` prints a Markdown table. The two sides
take turns within one run, and the table holds medians. Prompts are random and the end-of-sequence token is ignored, so
speed is all that is compared; transformers gets random weights of the same config.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from flax_paged import Engine, SamplingParams, load_model

# A side: number of sequences, prompt tokens, new tokens -> seconds.
Run = Callable[[int, int, int], float]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = parse_args(argv)
    try:
        model = load_model(args.model, dtype=args.dtype)
        sides = {"flax_paged": engine_side(model, args)}
        if not args.no_transformers:
            sides |= transformers_side(model, args.dtype)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [measure_prefill(sides, n, length, args.repeats) for n, length in args.prefill]
    rows += [measure_decode(sides, n, args.context, args.new_tokens, args.repeats) for n in args.batch_sizes]
    print(markdown(rows, list(sides), args))
    if args.json_file:
        result = {"model": args.model, "dtype": str(args.dtype), "machine": machine(), "rows": rows}
        Path(args.json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure prefill and decode speed.")
    add = parser.add_argument
    add("--model", default="smollm2", help="as in generate.py (smollm2)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="of decode (1 8 32)")
    add("--context", type=int, default=128, help="prompt tokens before decode (128)")
    add("--new-tokens", type=int, default=32, help="decoded tokens a sequence (32)")
    add("--prefill", type=_shape, nargs="*", default=[(1, 512), (8, 256)], metavar="NxL", help="prompts (1x512 8x256)")
    add("--repeats", type=int, default=3, help="turns of each side (3)")
    add("--max-num-batched-tokens", type=int, default=512)
    add("--page-size", type=int, default=16)
    add("--no-transformers", action="store_true", help="measure flax_paged alone")
    add("--json-file", metavar="FILE", help="write the numbers there too")
    return parser.parse_args(argv)


def engine_side(model, args: argparse.Namespace) -> Run:
    """Return how our engine runs a batch."""
    longest = max([args.context + args.new_tokens + 1, *(length + 2 for _, length in args.prefill)])
    largest = max([*args.batch_sizes, *(n for n, _ in args.prefill)])
    engine = Engine(
        model,
        page_size=args.page_size,
        max_num_seqs=largest,
        max_num_batched_tokens=max(args.max_num_batched_tokens, largest),
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(0)

    def run(num_seqs: int, prompt_len: int, new_tokens: int) -> float:
        prompts = rng.integers(0, engine.vocab_size, (num_seqs, prompt_len)).tolist()
        start = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
        return time.perf_counter() - start

    return run


def transformers_side(model, dtype: str) -> dict[str, Run]:
    """Return how transformers runs a batch; nothing if it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        print("transformers or torch is not installed; measuring flax_paged alone.", file=sys.stderr)
        return {}
    config = transformers.AutoConfig.for_model(**model.config.to_hf())
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(0)

    def run(num_seqs: int, prompt_len: int, new_tokens: int) -> float:
        ids = torch.randint(config.vocab_size, (num_seqs, prompt_len), generator=generator)
        start = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    return {"transformers": run}


def measure_prefill(sides: dict[str, Run], num_seqs: int, prompt_len: int, repeats: int) -> dict:
    """Prompt tokens per second until each prompt's first new token."""
    seconds = _interleaved(
        {name: (lambda run=run: run(num_seqs, prompt_len, 1)) for name, run in sides.items()}, repeats
    )
    rates = {name: num_seqs * prompt_len / value for name, value in seconds.items()}
    return {"case": f"prefill {num_seqs}x{prompt_len}", "tokens_per_second": rates}


def measure_decode(sides: dict[str, Run], num_seqs: int, context: int, new_tokens: int, repeats: int) -> dict:
    """New tokens per second after the first: a run with them less a run without."""

    def decode_seconds(run: Run) -> float:
        return run(num_seqs, context, new_tokens + 1) - run(num_seqs, context, 1)

    seconds = _interleaved({name: (lambda run=run: decode_seconds(run)) for name, run in sides.items()}, repeats)
    rates = {name: num_seqs * new_tokens / value for name, value in seconds.items()}
    return {"case": f"decode {num_seqs} at {context}", "tokens_per_second": rates}


def markdown(rows: list[dict], names: list[str], args: argparse.Namespace) -> str:
    """Format the result as a Markdown table."""
    ratio = len(names) > 1
    lines = [
        f"{args.model}, {args.dtype}, {machine()}; tokens/s, median of {args.repeats}",
        "",
        "| case | " + " | ".join(names) + (" | ratio |" if ratio else " |"),
        "|---" * (len(names) + 1 + ratio) + "|",
    ]
    for row in rows:
        rates = [row["tokens_per_second"][name] for name in names]
        cells = [row["case"], *(f"{rate:.1f}" for rate in rates)]
        if ratio:
            cells.append(f"{rates[0] / rates[1]:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    """Describe where the numbers come from."""
    device = jax.devices()[0]
    return f"{device.device_kind}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}"


def _interleaved(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, the sides taking turns; a first round compiles and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            value = side()
            if turn:
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _shape(text: str) -> tuple[int, int]:
    try:
        num_seqs, length = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NxL, such as 8x256") from None
    return num_seqs, length


if __name__ == "__main__":
    sys.exit(main())
