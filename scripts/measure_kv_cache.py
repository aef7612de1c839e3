"""What a quantised KV cache costs in accuracy: perplexity, divergence and greedy agreement beside a float32 cache.

`python scripts/measure_kv_cache.py --model smollm2 --text README.md docs/*.md` prints a Markdown table. The text runs
through the paged model in chunks, each chunk reading what the chunks before have written to the cache.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from flax_paged import CompiledStep, Engine, SamplingParams, load_model, load_tokenizer
from flax_paged.attention import cache_spec_for, init_cache
from flax_paged.calibration import calibrate_kv_scales
from flax_paged.metadata import SequenceSlice, build_metadata

PAGE_SIZE = 16
# (dtype, scales); None is what the cache takes by default.
CACHES = [
    ("float32", None), ("bfloat16", None), ("int8", "per_token_head"), ("int8", "per_head"),
    ("float8_e4m3fn", "per_head"), ("float8_e4m3fn", "per_token_head"), ("float8_e5m2", "per_head"),
]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    args = parse_args(argv)
    try:
        model, tokenizer = load_model(args.model, dtype="float32"), load_tokenizer(args.model)
        text = "\n".join(Path(path).read_text(encoding="utf-8") for path in args.text)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokens = np.array(tokenizer.encode(text)[: args.num_tokens], np.int32)
    calibration = tokenizer.encode(text)[args.num_tokens :][: args.num_tokens] or tokens.tolist()
    # Prompts are pieces of the text, from all over it.
    starts = np.linspace(0, max(len(tokens) - args.prompt_len, 0), args.num_prompts).astype(int)
    prompts = [tokens[start : start + args.prompt_len].tolist() for start in starts]

    print(f"{args.model}, {len(tokens)} tokens, {len(prompts)} prompts of {args.prompt_len}, jax {jax.__version__}\n")
    print("| cache | scales | bytes a token and layer | perplexity | KL to float32 | same first choice | same greedy |")
    print("|---|---|---|---|---|---|---|")
    exact = None
    for dtype, scales in tqdm(CACHES, desc="Measuring", unit="cache", disable=None):
        num_pages = -(-len(tokens) // PAGE_SIZE)
        spec = cache_spec_for(model, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype, scales=scales)
        if spec.scales == "per_head":
            calibrate_kv_scales(model, [calibration], spec)
        else:
            init_cache(model, spec)
        log_probs = log_probs_of(model, tokens, num_pages, args.chunk)
        # The engine takes each dtype's default scales, those of heads from the calibration above.
        is_default = spec.scales == cache_spec_for(model, num_pages=1, page_size=PAGE_SIZE, dtype=dtype).scales
        answers = greedy(model, dtype, prompts, args.max_tokens) if is_default else None
        exact = exact or (log_probs, answers)
        print(row(dtype, spec, log_probs, answers, tokens, *exact), flush=True)
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the accuracy of quantised KV caches.")
    add = parser.add_argument
    add("--model", default="smollm2", help="as in generate.py (smollm2)")
    add("--text", nargs="+", required=True, metavar="FILE", help="text to measure on, and after it to calibrate with")
    add("--num-tokens", type=int, default=2000, help="of the text that are measured (2000)")
    add("--chunk", type=int, default=250, help="tokens a step (250)")
    add("--num-prompts", type=int, default=20)
    add("--prompt-len", type=int, default=32, help="tokens of each prompt (32)")
    add("--max-tokens", type=int, default=32, help="greedy tokens after each prompt (32)")
    return parser.parse_args(argv)


def log_probs_of(model, tokens: np.ndarray, num_pages: int, chunk: int) -> np.ndarray:
    """Log-probabilities [N, V] after each token, computed chunk by chunk over the cache."""
    step = CompiledStep(model, lambda model, *args: jax.nn.log_softmax(model(*args)))
    rows = []
    for start in range(0, len(tokens), chunk):
        new = min(chunk, len(tokens) - start)
        metadata = build_metadata(
            [SequenceSlice(range(num_pages), start, new)],
            page_size=PAGE_SIZE, num_pages=num_pages, max_num_tokens=chunk, max_num_seqs=1, max_pages_per_seq=num_pages,
            logits="all",
        )  # fmt: skip
        padded = np.zeros(chunk, np.int32)
        padded[:new] = tokens[start : start + new]
        rows.append(np.asarray(step(padded, metadata))[:new].astype(np.float32))
    return np.concatenate(rows)


def greedy(model, dtype, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations by the engine with such a cache; calibrated scales are the model's."""
    engine = Engine(
        model, num_pages=512, page_size=PAGE_SIZE, max_num_seqs=len(prompts), max_model_len=256,
        kv_cache_dtype=dtype, eos_token_ids=[],
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]


def row(dtype, spec, log_probs, answers, tokens, exact_log_probs, exact_answers) -> str:
    """One line of the table."""
    perplexity = np.exp(-log_probs[np.arange(len(tokens) - 1), tokens[1:]].astype(np.float64).mean())
    divergence = (np.exp(exact_log_probs) * (exact_log_probs - log_probs)).sum(axis=1, dtype=np.float64).mean()
    first = (log_probs.argmax(axis=1) == exact_log_probs.argmax(axis=1)).mean()
    same = ""
    if answers is not None:
        num_same = sum(a == b for a, b in zip(answers, exact_answers, strict=True))
        same = f"{num_same} of {len(answers)}"
    nbytes = spec.page_nbytes // spec.page_size
    return f"| {dtype} | {spec.scales or ''} | {nbytes} | {perplexity:.3f} | {divergence:.5f} | {first:.1%} | {same} |"


if __name__ == "__main__":
    sys.exit(main())
