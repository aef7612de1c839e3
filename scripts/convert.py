"""Convert a checkpoint (safetensors folder, GGUF file, Hugging Face id, smollm2) into a folder of ours.

python scripts/convert.py SRC DST [--dtype bfloat16] [--overwrite]
"""

import argparse
import sys
import time
from pathlib import Path

from flax_paged.loading import load_model, load_tokenizer, save_model


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = _arguments(argv)
    if args.dst.exists() and not args.overwrite:
        print(f"error: {args.dst} exists already. Choose another name, or give --overwrite.", file=sys.stderr)
        return 1
    start = time.perf_counter()
    try:
        tokenizer = None if args.no_tokenizer else load_tokenizer(args.src)
        model = load_model(args.src, dtype=args.dtype)
        print(f"Writing {args.dst} ...", file=sys.stderr)
        save_model(model, args.dst, tokenizer, overwrite=args.overwrite)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.dst}: done in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", help="Hugging Face folder or id, .gguf file, folder of ours, or smollm2")
    parser.add_argument("dst", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace DST, once the new one is complete")
    parser.add_argument("--no-tokenizer", action="store_true", help="convert weights and config only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
