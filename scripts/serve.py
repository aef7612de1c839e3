"""Serve a model over HTTP, as OpenAI's API: `python scripts/serve.py --model smollm2`.

It listens on this machine only, unless --host says otherwise. The log goes to stderr. The server answers at once, but
/health says 503 until the model is loaded and every step shape is compiled. SIGTERM lets running calls finish.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

from flax import nnx

from flax_paged import Engine, load_model, load_tokenizer
from flax_paged.generation import use_compilation_cache
from flax_paged.loading import load_model_shape
from flax_paged.training import load_adapter, read_adapter, stack_lora

try:
    from flax_paged.serving import ServerOptions, Service, free_memory, open_socket, plan_memory, serve
except ImportError as error:
    sys.exit(f"error: {error}. The server needs the extra: pip install 'flax-paged[serve]'")

# Without --max-model-len, longer contexts than this are not planned for, to keep shapes and memory small.
_DEFAULT_MAX_MODEL_LEN = 4096

_LOGGER = logging.getLogger("flax_paged.serving")


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    args = parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("flax_paged").setLevel(args.log_level.upper())
    try:
        service = Service(server_options(args))
        listener = open_socket(args.host, args.port)  # before anything that takes time
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _LOGGER.info("Listening on %s; not ready yet", address)
        serve(service, lambda: load_engine(args, address), listener)
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Serve a model over HTTP, as OpenAI's API.")
    add = parser.add_argument
    add("--model", required=True, help="folder (Orbax or Hugging Face), GGUF file, Hugging Face id, or 'smollm2'")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="a LoRA adapter; NAME is its model name in the API, and there may be several (without, it is always used)",
    )
    add("--served-model-name", metavar="NAME", help="the model's name in the API (the last part of --model)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any (8000)")
    add("--api-key", help="calls must bring this key (the variable FLAX_PAGED_API_KEY, which no process list shows)")
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web origins that may call (none)")
    add("--log-prompts", action="store_true", help="write prompts to the log")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    add("--compilation-cache", metavar="FOLDER", help="keep compiled steps here, for the next start")
    limits = parser.add_argument_group("limits")
    add = limits.add_argument
    add("--max-body-bytes", type=int, default=4 * 2**20, help="largest body (4 MiB)")
    add("--body-timeout", type=float, default=30, metavar="S", help="for headers and body to arrive (30)")
    add("--max-num-answers", type=int, default=128, help="most answers of a call: prompts x n (128)")
    add("--max-num-waiting", type=int, default=256, help="most prompts that wait for a place (256)")
    add("--queue-timeout", type=float, default=60, metavar="S", help="longest wait for a place (60)")
    add("--request-timeout", type=float, default=600, metavar="S", help="longest call (600)")
    add("--shutdown-grace", type=float, default=30, metavar="S", help="for running calls after SIGTERM (30)")
    options = parser.add_argument_group("engine")
    add = options.add_argument
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (the checkpoint's)")
    add("--page-size", type=int, default=16, help="tokens in a page (16)")
    add("--num-pages", type=int, help="pages in the pool (what fits 1 GiB)")
    add("--max-num-seqs", type=int, default=32, help="most sequences in a step (32)")
    add("--max-num-batched-tokens", type=int, default=512, help="most tokens in a step (512)")
    add("--max-model-len", type=int, help=f"most tokens of a sequence (the model's, up to {_DEFAULT_MAX_MODEL_LEN})")
    add("--num-speculative-tokens", type=int, default=0, help="guess repeated text ahead (0)")
    add("--no-warmup", action="store_true", help="compile each step shape when it is first needed")
    return parser.parse_args(argv)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Make the ServerOptions that the command line asks for."""
    return ServerOptions(
        model_name=args.served_model_name or Path(args.model).name,
        adapter_names=tuple(name for name, _ in named_adapters(args)),
        api_key=args.api_key or os.environ.get("FLAX_PAGED_API_KEY") or None,
        max_body_bytes=args.max_body_bytes,
        body_timeout=args.body_timeout,
        max_num_answers=args.max_num_answers,
        max_num_waiting=args.max_num_waiting,
        queue_timeout=args.queue_timeout,
        request_timeout=args.request_timeout,
        shutdown_grace=args.shutdown_grace,
        allowed_origins=tuple(args.allowed_origins),
        log_prompts=args.log_prompts,
    )


def named_adapters(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return name and folder of the adapters that calls choose by name.

    Raises:
        ValueError: One of several adapters has no name.
    """
    named = [tuple(text.split("=", 1)) for text in args.adapter if "=" in text]
    if len(named) < len(args.adapter) and len(args.adapter) > 1:
        raise ValueError(f"--adapter {' '.join(args.adapter)}: expected NAME=FOLDER for each of several.")
    return named


def load_adapters(args: argparse.Namespace, model: nnx.Module) -> None:
    """Put the adapters on the model, side by side where they have names."""
    if named := named_adapters(args):
        stack_lora(model, [read_adapter(model, folder) for _, folder in named])
    elif args.adapter:
        load_adapter(model, args.adapter[0])


def load_engine(args: argparse.Namespace, address: str) -> Engine:
    """Load the model and its tokenizer, make an engine and warm it up.

    Raises:
        ValueError: It does not fit the memory there is.
    """
    start = time.monotonic()
    if args.compilation_cache:
        use_compilation_cache(args.compilation_cache)
    _LOGGER.info("Loading %s", args.model)
    shape = load_model_shape(args.model, dtype=args.dtype)
    max_model_len = args.max_model_len
    if max_model_len is None:
        max_model_len = min(getattr(shape.config, "max_position_embeddings", None) or 2048, _DEFAULT_MAX_MODEL_LEN)
    sizes = {
        "page_size": args.page_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": max_model_len,
    }
    plan = plan_memory(shape, num_pages=args.num_pages, vocab_size=shape.config.vocab_size, **sizes)
    plan.check(*free_memory())
    model = load_model(args.model, dtype=args.dtype)
    load_adapters(args, model)
    engine = Engine(
        model,
        load_tokenizer(args.model),
        num_pages=plan.num_pages,
        num_speculative_tokens=args.num_speculative_tokens,
        **sizes,
    )
    _LOGGER.info("Loaded in %.1f s; %s", time.monotonic() - start, plan)
    if not args.no_warmup:
        _LOGGER.info("Compiling the step shapes")
        engine.warmup()
    _LOGGER.info("Ready after %.1f s: %s", time.monotonic() - start, address)
    return engine


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # a signal may come while a thread compiles, which the interpreter's own end would not survive
