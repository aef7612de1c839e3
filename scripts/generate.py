"""Generate text: `python scripts/generate.py --model smollm2 --prompt "The capital of France is"`.

Text goes to stdout, progress and statistics to stderr. With --json, stdout holds one JSON object a prompt and nothing
else: prompt, prompt_token_ids, text, token_ids, finish_reason.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flax_paged import Engine, SamplingParams, load_model, load_tokenizer
from flax_paged.generation import use_compilation_cache
from flax_paged.generation.outputs import RequestOutput
from flax_paged.training import load_adapter

# Without --max-model-len, longer contexts than this are not planned for, to keep shapes and memory small.
_DEFAULT_MAX_MODEL_LEN = 4096


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    args = parse_args(argv)
    try:
        params = sampling_params(args)
        prompts = None if args.chat else read_prompts(args)
        engine = load_engine(args)
        if args.chat:
            chat(engine, params, args.json)
        else:
            generate(engine, prompts, params, args.json)
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Generate text with a model.")
    add = parser.add_argument
    add("--model", required=True, help="folder (Orbax or Hugging Face), GGUF file, Hugging Face id, or 'smollm2'")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter, of scripts/finetune.py or of PEFT")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    source.add_argument("--prompts-file", metavar="FILE", help="a prompt a line, or .jsonl with 'prompt'; - is stdin")
    source.add_argument("--chat", action="store_true", help="talk with the model, a line a turn")
    add("--max-tokens", type=int, default=128, help="most new tokens of a prompt (128)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=None, help="makes sampled answers reproducible")
    add("--n", type=int, default=1, help="answers to each prompt (1)")
    add("--repetition-penalty", type=float, default=1.0)
    add("--stop", nargs="+", default=[], metavar="TEXT", help="texts that end an answer")
    add("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add("--json", action="store_true", help="one JSON object a prompt on stdout")
    options = parser.add_argument_group("engine")
    options.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (the checkpoint's)"
    )
    options.add_argument("--page-size", type=int, default=16, help="tokens in a page (16)")
    options.add_argument("--num-pages", type=int, help="pages in the pool (what fits 1 GiB)")
    options.add_argument("--max-num-seqs", type=int, default=32, help="most sequences in a step (32)")
    options.add_argument("--max-num-batched-tokens", type=int, default=512, help="most tokens in a step (512)")
    options.add_argument("--max-model-len", type=int, help="most tokens of a sequence")
    options.add_argument("--num-speculative-tokens", type=int, default=0, help="guess repeated text ahead (0)")
    options.add_argument("--warmup", action="store_true", help="compile every step shape before the first prompt")
    options.add_argument("--compilation-cache", metavar="FOLDER", help="keep compiled steps there for the next run")
    return parser.parse_args(argv)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Make the SamplingParams that the command line asks for."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        n=args.n,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line or of the file; blank lines of a file are skipped."""
    if args.prompt is not None:
        return args.prompt
    if args.prompts_file == "-":
        lines = sys.stdin.read().splitlines()
    else:
        lines = Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if args.prompts_file.endswith(".jsonl"):
            line = _prompt_of_json(line, f"{args.prompts_file}, line {number}")
        prompts.append(line)
    if not prompts:
        raise ValueError(f"{args.prompts_file} holds no prompts.")
    return prompts


def load_engine(args: argparse.Namespace) -> Engine:
    """Load the model and its tokenizer and make an engine."""
    start = time.monotonic()
    if args.compilation_cache:
        use_compilation_cache(args.compilation_cache)
    print(f"Loading {args.model} ...", file=sys.stderr)
    model = load_model(args.model, dtype=args.dtype)
    if args.adapter:
        load_adapter(model, args.adapter)
    tokenizer = load_tokenizer(args.model)
    max_model_len = args.max_model_len
    if max_model_len is None:
        max_model_len = min(getattr(model.config, "max_position_embeddings", None) or 2048, _DEFAULT_MAX_MODEL_LEN)
    engine = Engine(
        model,
        tokenizer,
        num_pages=args.num_pages,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=args.num_speculative_tokens,
    )
    if args.warmup:
        engine.warmup()
    print(f"Loaded in {time.monotonic() - start:.1f} s. The first step of each shape compiles.", file=sys.stderr)
    return engine


def generate(engine: Engine, prompts: list[str], params: SamplingParams, as_json: bool) -> None:
    """Answer the prompts; a single one is streamed when someone is watching."""
    start = time.monotonic()
    if len(prompts) == 1 and params.n == 1 and not as_json:
        print(prompts[0], end="", flush=True)
        outputs = [_print_stream(engine.stream(prompts, params))]
    else:
        outputs = engine.generate(prompts, params, progress=True)
        for output in outputs:
            _print_output(output, as_json)
    _print_statistics(engine, len(outputs), time.monotonic() - start)


def chat(engine: Engine, params: SamplingParams, as_json: bool) -> None:
    """Answer stdin line by line, with the conversation so far as context, until its end or "exit"."""
    messages: list[dict[str, str]] = []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        token_ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        if as_json:
            output = engine.generate([token_ids], params)[0]
            output.prompt = line
            _print_output(output, as_json)
        else:
            output = _print_stream(engine.stream([token_ids], params))
        messages.append({"role": "assistant", "content": output.outputs[0].text})


def _prompt_of_json(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: expected a JSON object with 'prompt', got {line[:60]!r}.") from error
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: expected 'prompt' to be text, got {prompt!r}.")
    return prompt


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        print("Type a message; 'exit' or Ctrl-D ends.", file=sys.stderr)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "exit":
            return
        if line.strip():
            yield line.strip()


def _print_stream(stream: Iterator[RequestOutput]) -> RequestOutput:
    """Print the pieces of one request as they come; returns the whole."""
    whole = None
    for piece in stream:
        if whole is None:
            whole = piece
        else:
            whole.outputs[0].text += piece.outputs[0].text
            whole.outputs[0].token_ids += piece.outputs[0].token_ids
            whole.outputs[0].finish_reason = piece.outputs[0].finish_reason
        print(piece.outputs[0].text, end="", flush=True)
    print(flush=True)
    return whole


def _print_output(output: RequestOutput, as_json: bool) -> None:
    """Print each answer to a prompt; with `--n`, a JSON object an answer."""
    for answer in output.outputs:
        if not as_json:
            print(f"{output.prompt}{answer.text}\n", flush=True)
            continue
        fields = {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        print(json.dumps(fields, ensure_ascii=False), flush=True)


def _print_statistics(engine: Engine, num_prompts: int, seconds: float) -> None:
    stats = engine.stats()
    num_pages = stats.num_free_pages + stats.num_cached_pages + stats.num_live_pages
    print(
        f"{num_prompts} prompts, {stats.num_sampled_tokens} new tokens in {seconds:.1f} s:"
        f" {stats.num_sampled_tokens / seconds:.1f} tokens/s, compiling included. {stats.num_computed_tokens} tokens"
        f" computed in {stats.num_steps} steps, {stats.num_cached_tokens} found in the prefix cache;"
        f" {stats.num_preemptions} preemptions; {num_pages - stats.num_free_pages} of {num_pages} pages used."
        + (
            f" {stats.num_right_draft_tokens} of {stats.num_draft_tokens} guesses right."
            if stats.num_draft_tokens
            else ""
        ),
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
