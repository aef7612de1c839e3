"""Throughput of the engine on many requests of mixed length, beside transformers and beside the compiled steps alone.

`python scripts/benchmark_engine.py --model smollm2` answers one list of random prompts in three ways and prints
the wanted new tokens per second of each:

* engine: `Engine.generate`, continuous batching.
* steps alone: the same compiled steps on the same batches, prepared beforehand; the difference is what the host costs.
* transformers: `generate` on batches padded on the left, each as long as its longest answer, as its users do; with
  random weights of the same config. Left out if it is not installed.

Ends of sequence are ignored, so speed is all that is compared. The ways take turns, and the medians are printed.
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
from flax_paged.generation import use_compilation_cache

# Prompt and number of tokens wanted.
Request = tuple[list[int], int]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = parse_args(argv)
    try:
        if args.compilation_cache:
            use_compilation_cache(args.compilation_cache)
        model = load_model(args.model, dtype=args.dtype)
        engine = make_engine(model, args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    requests = random_requests(args, engine.vocab_size)
    # The run in which the engine's steps are noted compiles them, too.
    ways = {"engine": lambda: run_engine(engine, requests), "steps alone": steps_alone(engine, requests)}
    if not args.no_transformers:
        ways |= transformers_way(model, requests, args)
    seconds = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    report(requests, {name: statistics.median(values) for name, values in seconds.items()}, args)
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the engine's throughput on requests of mixed length.")
    add = parser.add_argument
    add("--model", default="smollm2", help="as in generate.py (smollm2)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--num-requests", type=int, default=32)
    add("--prompt-tokens", type=int, nargs=2, default=[8, 400], metavar=("MIN", "MAX"))
    add("--new-tokens", type=int, nargs=2, default=[16, 128], metavar=("MIN", "MAX"))
    add("--max-num-seqs", type=int, default=32)
    add("--max-num-batched-tokens", type=int, default=512)
    add("--page-size", type=int, default=16)
    add("--decode-steps-per-call", type=int, default=1)
    add("--transformers-batch-size", type=int, default=32, help="prompts padded together (32)")
    add("--no-transformers", action="store_true", help="measure ours alone")
    add("--repeats", type=int, default=3, help="turns of each way (3)")
    add("--compilation-cache", metavar="FOLDER", help="keep compiled steps there for the next run")
    add("--json-file", metavar="FILE", help="write the numbers there too")
    return parser.parse_args(argv)


def random_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return prompts of random tokens and lengths, the same at every call."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(0, vocab_size, rng.integers(*args.prompt_tokens, endpoint=True)).tolist(),
            int(rng.integers(*args.new_tokens, endpoint=True)),
        )
        for _ in range(args.num_requests)
    ]


def make_engine(model, args: argparse.Namespace) -> Engine:
    """Return an engine with room for every request; each turn computes everything again."""
    return Engine(
        model,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.prompt_tokens[1] + args.new_tokens[1],
        enable_prefix_caching=False,
        max_logprobs=0,
        decode_steps_per_call=args.decode_steps_per_call,
    )


def run_engine(engine: Engine, requests: list[Request]) -> None:
    """Answer the requests."""
    params = [SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True) for _, wanted in requests]
    engine.generate([prompt for prompt, _ in requests], params)


def steps_alone(engine: Engine, requests: list[Request]) -> Callable[[], None]:
    """Note the engine's calls for the requests, and return what makes them again without any work between them."""
    runner, calls = engine._runner, []
    run = runner._run

    def noting(batch, *shape):
        calls.append((jax.device_put(batch), *shape))
        return run(batch, *shape)

    runner._run = noting
    run_engine(engine, requests)
    runner._run = run

    def replay() -> None:
        last = runner._last_token_ids
        for call in calls:
            # As in `ModelRunner.launch`: each step takes its pending tokens from the one before.
            sampled, runner._last_token_ids = run(*call)
        jax.block_until_ready(sampled)
        runner._last_token_ids = last

    return replay


def transformers_way(model, requests: list[Request], args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return how transformers answers the requests; nothing if it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        print("transformers or torch is not installed; measuring ours alone.", file=sys.stderr)
        return {}
    config = transformers.AutoConfig.for_model(**model.config.to_hf())
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()

    def generate(batch: list[Request]) -> None:
        width, wanted = max(len(prompt) for prompt, _ in batch), max(wanted for _, wanted in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        options = {"min_new_tokens": wanted, "max_new_tokens": wanted, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            peer.generate(ids, attention_mask=mask, **options)

    def run() -> None:
        size = args.transformers_batch_size
        for i in range(0, len(requests), size):
            generate(requests[i : i + size])

    generate([(prompt[:4], 2) for prompt, _ in requests[:2]])  # the first call sets things up
    return {"transformers": run}


def report(requests: list[Request], seconds: dict[str, float], args: argparse.Namespace) -> None:
    """Print a Markdown table, and write the JSON file if one is asked for."""
    num_prompt, num_new = sum(len(prompt) for prompt, _ in requests), sum(wanted for _, wanted in requests)
    print(f"{args.model}, {args.dtype}, {machine()}; median of {args.repeats};")
    print(f"{len(requests)} requests, {num_prompt} prompt tokens, {num_new} new tokens")
    print("\n| way | seconds | new tokens/s | engine / way |\n|---|---|---|---|")
    rows = []
    for name, value in seconds.items():
        rows.append({"way": name, "seconds": value, "new_tokens_per_second": num_new / value})
        print(f"| {name} | {value:.2f} | {num_new / value:.1f} | {value / seconds['engine']:.2f} |")
    if args.json_file:
        result = {**vars(args), "machine": machine(), "num_prompt": num_prompt, "num_new": num_new, "rows": rows}
        Path(args.json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def machine() -> str:
    """Describe where the numbers come from."""
    device = jax.devices()[0]
    return f"{device.device_kind}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}"


if __name__ == "__main__":
    sys.exit(main())
