"""Fine-tune a model: `python scripts/finetune.py --model smollm2 --data chats.jsonl --lora --output runs/first`.

The output folder gets `metrics.jsonl` and `loss.png` as the run goes, `checkpoints/` to go on from with --resume, and
at the end `adapter/` (with --lora) or `model/`, which scripts/generate.py serves with --adapter or --model. Answers to
the prompts of --sample-prompts go to `samples.jsonl`; the same process serves them, with the weights being trained.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tqdm import tqdm

from flax_paged import Engine, SamplingParams, load_model, load_tokenizer, save_model
from flax_paged.generation.text import Tokenizer
from flax_paged.training import (
    DEFAULT_TARGETS,
    Evaluator,
    TokenBatch,
    TrainStep,
    adamw,
    add_lora,
    evaluation_batches,
    learning_rate_schedule,
    next_token_loss,
    pack_examples,
    pad_examples,
    read_examples,
    save_adapter,
    training_batches,
)
from flax_paged.training.checkpoints import TrainingCheckpoints, open_checkpoints
from flax_paged.training.metrics import MetricsFile, plot_losses
from flax_paged.training.optimizers import SCHEDULES


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    args = parse_args(argv)
    try:
        finetune(args)
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; go on with --resume", file=sys.stderr)
        return 130
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a model.")
    add = parser.add_argument
    add("--model", required=True, help="what to start from: a folder, GGUF file, Hugging Face id, or 'smollm2'")
    add("--data", required=True, metavar="FILE", help=".jsonl with messages, prompt and completion, or text; or text")
    add("--eval-data", metavar="FILE", help="data of the same kind, to measure the loss on")
    add("--output", required=True, metavar="FOLDER", help="folder of the run")
    add("--resume", action="store_true", help="go on from the newest checkpoint in the folder, if there is one")
    add("--skip-bad-data", action="store_true", help="leave out lines that cannot be used; they are named and counted")
    add("--seed", type=int, default=0, help="of the order of the data and of new adapters (0)")
    group = parser.add_argument_group("adapters")
    group.add_argument("--lora", action="store_true", help="train adapters and leave the model as it is")
    group.add_argument("--lora-rank", type=int, default=8)
    group.add_argument("--lora-alpha", type=float, help="scale times rank (twice the rank)")
    group.add_argument("--lora-targets", nargs="+", default=list(DEFAULT_TARGETS), metavar="NAME")
    group.add_argument("--adapter-format", choices=["orbax", "peft"], default="orbax")
    group = parser.add_argument_group("steps")
    group.add_argument("--epochs", type=float, default=3.0, help="passes over the data (3)")
    group.add_argument("--steps", type=int, help="optimizer steps, instead of passes")
    group.add_argument("--batch-size", type=int, default=8, help="rows of a step (8)")
    group.add_argument("--micro-batches", type=int, default=1, help="parts a step is computed in, to save memory (1)")
    group.add_argument("--max-length", type=int, default=512, help="tokens of a row (512)")
    group.add_argument("--no-packing", action="store_true", help="one example a row")
    group.add_argument("--compute-dtype", choices=["float32", "bfloat16"], default="float32")
    group.add_argument("--remat", choices=["dots", "full"], help="compute layers again in the backward pass")
    group = parser.add_argument_group("optimizer")
    group.add_argument("--learning-rate", type=float, help="largest one (2e-4 with --lora, 2e-5 without)")
    group.add_argument("--schedule", choices=SCHEDULES, default="cosine")
    group.add_argument("--warmup-steps", type=int, help="steps of the rise (a twentieth of all)")
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--max-grad-norm", type=float, default=1.0)
    group.add_argument("--label-smoothing", type=float, default=0.0)
    group.add_argument("--z-loss", type=float, default=0.0)
    group = parser.add_argument_group("reports")
    group.add_argument("--eval-every", type=int, help="steps between evaluations (once a pass)")
    group.add_argument("--checkpoint-every", type=int, help="steps between checkpoints (once a pass)")
    group.add_argument("--keep", type=int, default=2, help="checkpoints kept (2)")
    group.add_argument("--sample-prompts", metavar="FILE", help="a prompt a line, answered as the run goes")
    group.add_argument("--sample-every", type=int, help="steps between answers (once a pass)")
    group.add_argument("--sample-raw", action="store_true", help="give prompts as they are, without the chat template")
    group.add_argument("--sample-tokens", type=int, default=64, help="most new tokens of an answer (64)")
    return parser.parse_args(argv)


def finetune(args: argparse.Namespace) -> None:
    """Run, or go on with, a fine-tuning run."""
    output = Path(args.output)
    if not args.resume and output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty. Go on with that run (--resume), or choose another --output.")
    tokenizer = load_tokenizer(args.model)
    rows = read_rows(args.data, tokenizer, args)
    eval_rows = read_rows(args.eval_data, tokenizer, args) if args.eval_data else None
    model = load_for_training(args)
    steps = plan_steps(args, len(rows.tokens))
    run = make_run(args, model, tokenizer, steps)
    output.mkdir(parents=True, exist_ok=True)
    settings = settings_of(args, steps)
    metrics = MetricsFile(output / "metrics.jsonl")
    with open_checkpoints(output / "checkpoints", max_to_keep=args.keep, settings=settings) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            checkpoints.restore(first, run.model, run.optimizer)
            print(f"Going on after step {first}.", file=sys.stderr)
        metrics.forget_after(first)
        try:
            train(args, run, training_batches(rows, args.batch_size, seed=args.seed), eval_rows, checkpoints, metrics)
        finally:
            if metrics.has_losses:
                plot_losses(metrics.read(), output / "loss.png")
    save_result(args, run, output)


@dataclasses.dataclass(frozen=True)
class Steps:
    """How many steps a run has, and the number of steps between the things it does now and then."""

    total: int
    per_epoch: float
    evaluate: int
    checkpoint: int
    sample: int


@dataclasses.dataclass
class Run:
    """What a run works with."""

    model: nnx.Module
    tokenizer: Tokenizer
    optimizer: nnx.Optimizer
    step: TrainStep
    evaluator: Evaluator
    learning_rate: Any  # step -> learning rate
    steps: Steps
    sampler: "Sampler | None"


def read_rows(path: str, tokenizer: Tokenizer, args: argparse.Namespace) -> TokenBatch:
    """Read a file of data into rows; what is found is told on stderr."""
    examples, report = read_examples(path, tokenizer, max_length=args.max_length, skip_bad=args.skip_bad_data)
    rows = (pad_examples if args.no_packing else pack_examples)(examples, args.max_length)
    used = (rows.segment_ids > 0).mean()
    print(f"{report.summary()}\n{len(rows.tokens)} rows of {args.max_length} tokens, {used:.0%} full.", file=sys.stderr)
    return rows


def load_for_training(args: argparse.Namespace) -> nnx.Module:
    """Load the model, its trained parameters in float32, and add adapters if they are wanted."""
    model = load_model(args.model, dtype=args.compute_dtype if args.lora else "float32")
    if args.lora:
        add_lora(
            model,
            rank=args.lora_rank,
            alpha=args.lora_alpha,
            targets=args.lora_targets,
            rngs=nnx.Rngs(args.seed),
        )
    return model


def plan_steps(args: argparse.Namespace, num_rows: int) -> Steps:
    """Work out the numbers of steps."""
    per_epoch = num_rows / args.batch_size
    total = args.steps if args.steps is not None else math.ceil(args.epochs * per_epoch)
    if total < 1:
        raise ValueError(f"--steps {args.steps}, --epochs {args.epochs}: expected at least one step.")
    chosen = {"eval": args.eval_every, "checkpoint": args.checkpoint_every, "sample": args.sample_every}
    for name, every in chosen.items():
        if every is not None and every < 1:
            raise ValueError(f"--{name}-every {every}: expected at least 1.")
    epoch = max(round(per_epoch), 1)
    return Steps(total, per_epoch, *(every or epoch for every in chosen.values()))


def make_run(args: argparse.Namespace, model: nnx.Module, tokenizer: Tokenizer, steps: Steps) -> Run:
    """Make the optimizer, the compiled steps and the engine over one model."""
    peak = args.learning_rate or (2e-4 if args.lora else 2e-5)
    warmup = args.warmup_steps if args.warmup_steps is not None else steps.total // 20
    learning_rate = learning_rate_schedule(peak, steps.total, kind=args.schedule, num_warmup_steps=warmup)
    transform = adamw(learning_rate, weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.LoRAParam if args.lora else nnx.Param)
    compute_dtype = None if args.lora else args.compute_dtype

    def loss(model, batch):
        return next_token_loss(model, batch, label_smoothing=args.label_smoothing, z_loss=args.z_loss, remat=args.remat)

    return Run(
        model,
        tokenizer,
        optimizer,
        TrainStep(model, optimizer, loss, num_micro_batches=args.micro_batches, compute_dtype=compute_dtype),
        Evaluator(model, compute_dtype=compute_dtype),
        learning_rate,
        steps,
        Sampler(model, tokenizer, args) if args.sample_prompts else None,
    )


def settings_of(args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """Return what two parts of one run must have in common for the whole to be as if it was never interrupted."""
    reports = {"output", "resume", "skip_bad_data", "adapter_format", "epochs", "keep"}
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in reports and not name.startswith(("eval_", "checkpoint_", "sample_"))
    }
    digest = hashlib.sha256(Path(args.data).read_bytes()).hexdigest()
    return settings | {"data": digest, "steps": steps.total}


def train(
    args: argparse.Namespace,
    run: Run,
    batches: Any,
    eval_rows: TokenBatch | None,
    checkpoints: TrainingCheckpoints,
    metrics: MetricsFile,
) -> None:
    """Take the steps that are left, and report."""
    first, total = int(run.optimizer.step[...]), run.steps.total
    output = Path(args.output)
    if first == 0:
        report(args, run, 0, eval_rows, metrics)
    with tqdm(total=total, initial=first, unit="step", desc="Training", disable=None) as bar:
        for number in range(first + 1, total + 1):
            values = take_step(run, batches[number - 1], number)
            metrics.write(values)
            bar.set_postfix_str(f"loss {values['loss']:.4f}, {values['tokens_per_second']:.0f} tokens/s")
            bar.update()
            report(args, run, number, eval_rows, metrics)
            if number % run.steps.checkpoint == 0 or number == total:
                checkpoints.save(number, run.model, run.optimizer)
                plot_losses(metrics.read(), output / "loss.png")
                tell(f"step {number} of {total}: loss {values['loss']:.4f}, checkpoint written")


def report(args: argparse.Namespace, run: Run, number: int, eval_rows: TokenBatch | None, metrics: MetricsFile) -> None:
    """Measure the loss on other data and answer the prompts, if a step is one after which that is wanted."""
    is_last = number == run.steps.total
    if eval_rows is not None and (number % run.steps.evaluate == 0 or is_last):
        found = run.evaluator(evaluation_batches(eval_rows, args.batch_size))
        metrics.write({"step": number, **{f"eval_{name}": value for name, value in found.items()}})
        tell(f"step {number}: eval loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}")
    if run.sampler and (number % run.steps.sample == 0 or is_last):
        run.sampler.write(number, Path(args.output) / "samples.jsonl")


def take_step(run: Run, batch: TokenBatch, number: int) -> dict[str, float]:
    """Take one optimizer step; returns its metrics.

    Raises:
        FloatingPointError: The loss is not a finite number.
    """
    start = time.perf_counter()
    values = {name: float(value) for name, value in run.step(batch).items()}
    seconds = time.perf_counter() - start
    if not math.isfinite(values["loss"]):
        raise FloatingPointError(
            f"the loss of step {number} is {values['loss']}. Try a smaller --learning-rate, or --compute-dtype float32."
        )
    num_tokens = int(np.count_nonzero(batch.segment_ids))
    return {
        "step": number,
        "epoch": round(number / run.steps.per_epoch, 4),
        **values,
        "learning_rate": float(run.learning_rate(number - 1)),
        "num_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "seconds": seconds,
    }


class Sampler:
    """Answers a few prompts with the model as it is being trained, by an engine over the same module.

    Args:
        model: The model that is trained.
        tokenizer: Its tokenizer.
        args: The command line.
    """

    def __init__(self, model: nnx.Module, tokenizer: Tokenizer, args: argparse.Namespace):
        lines = Path(args.sample_prompts).read_text(encoding="utf-8").splitlines()
        self.prompts = [line for line in lines if line.strip()]
        if not self.prompts:
            raise ValueError(f"{args.sample_prompts} holds no prompts.")
        self.model = model
        self.as_chat = tokenizer.has_chat_template and not args.sample_raw
        self.tokenizer = tokenizer
        self.params = SamplingParams(temperature=0, max_tokens=args.sample_tokens)
        longest = max(len(self._prompt(prompt)) for prompt in self.prompts)
        self.engine = Engine(
            model, tokenizer, max_num_seqs=min(len(self.prompts), 8), max_model_len=longest + args.sample_tokens
        )

    def write(self, step: int, path: Path) -> None:
        """Add an answer to each prompt to a JSONL file."""
        self.engine.update_weights(self.model)
        outputs = self.engine.generate([self._prompt(prompt) for prompt in self.prompts], self.params)
        with path.open("a", encoding="utf-8") as file:
            for prompt, output in zip(self.prompts, outputs, strict=True):
                values = {"step": step, "prompt": prompt, "text": output.outputs[0].text}
                file.write(json.dumps(values, ensure_ascii=False) + "\n")

    def _prompt(self, prompt: str) -> list[int]:
        if self.as_chat:
            return self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)


def save_result(args: argparse.Namespace, run: Run, output: Path) -> None:
    """Write what has been learnt, in the form that is served."""
    if args.lora:
        save_adapter(run.model, output / "adapter", format=args.adapter_format, overwrite=True)
        print(f"Serve it: --model {args.model} --adapter {output / 'adapter'}", file=sys.stderr)
    else:
        save_model(run.model, output / "model", run.tokenizer, overwrite=True)
        print(f"Serve it: --model {output / 'model'}", file=sys.stderr)


def tell(message: str) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
