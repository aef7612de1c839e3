"""Reinforcement learning with one module: sampled by the engine, trained by GRPO, in one process.

`python scripts/rl_example.py --model smollm2 --lora` teaches a model to answer in digits: the reward of an answer is
the fraction of its characters that are digits. Each iteration samples a group of answers to every prompt, takes one
step on their log-probabilities weighted by how much better than its group each answer was, and hands the new weights to
the engine. Reference: Shao et al. 2024, "DeepSeekMath", section 4.

One JSON object an iteration goes to stdout: `mean_reward`, and `max_logprob_gap`, the largest difference between what
the engine said the log-probability of a sampled token was and what the training form computes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_paged import Engine, SamplingParams, load_model, load_tokenizer
from flax_paged.generation.outputs import RequestOutput
from flax_paged.generation.text import Tokenizer
from flax_paged.step import CompiledStep
from flax_paged.training import Example, LossSums, TrainStep, adamw, add_lora, pad_examples, token_logprobs

PROMPTS = ["How many legs has a spider?", "What is two plus three?", "When did the war end?", "What is the time?"]


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    args = parse_args(argv)
    try:
        for report in reinforce(args, digit_fraction):
            print(json.dumps(report), flush=True)
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Reinforce answers that consist of digits.")
    add = parser.add_argument
    add("--model", required=True, help="a folder, GGUF file, Hugging Face id, or 'smollm2'")
    add("--lora", action="store_true", help="train adapters and leave the model as it is")
    add("--prompts", nargs="+", default=PROMPTS, metavar="TEXT")
    add("--iterations", type=int, default=30, help="rounds of sampling and training (30)")
    add("--group", type=int, default=8, help="answers to each prompt (8)")
    add("--max-tokens", type=int, default=16, help="most tokens of an answer (16)")
    add("--learning-rate", type=float, default=1e-3)
    add("--clip", type=float, default=0.2, help="how far the ratio of probabilities may move in a step (0.2)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def digit_fraction(text: str) -> float:
    """Return the reward of an answer: the fraction of its characters that are digits."""
    return sum(character in "0123456789" for character in text) / max(len(text), 1)


def reinforce(args: argparse.Namespace, reward: Callable[[str], float]) -> Iterator[dict[str, float]]:
    """Train, and yield what each iteration brought."""
    if args.group < 2:
        raise ValueError(f"--group {args.group}: expected at least 2 answers, to compare them.")
    model, tokenizer = load_model(args.model, dtype="float32"), load_tokenizer(args.model)
    if args.lora:
        add_lora(model, rngs=nnx.Rngs(args.seed))
    prompts = [encode(prompt, tokenizer) for prompt in args.prompts]
    max_length = max(map(len, prompts)) + args.max_tokens
    engine = Engine(model, tokenizer, max_model_len=max_length, max_logprobs=1, seed=args.seed)
    params = SamplingParams(n=args.group, temperature=1.0, max_tokens=args.max_tokens, logprobs=0)
    optimizer = nnx.Optimizer(model, adamw(args.learning_rate), wrt=nnx.LoRAParam if args.lora else nnx.Param)
    step = TrainStep(model, optimizer, lambda model, batch: policy_loss(model, batch, clip=args.clip))
    logprobs_of = CompiledStep(model, sampled_logprobs)
    for iteration in range(1, args.iterations + 1):
        outputs = engine.generate(prompts, params)
        rewards = np.array([[reward(answer.text) for answer in output.outputs] for output in outputs], np.float32)
        batch = batch_of(outputs, advantages_of(rewards), max_length)
        logprobs_of.update_weights(model)
        gap = np.abs(np.asarray(logprobs_of(batch)) - batch["logprobs"])[batch["tokens"].weights > 0].max()
        metrics = step(batch)
        engine.update_weights(model)
        yield {
            "iteration": iteration,
            "mean_reward": float(rewards.mean()),
            "max_logprob_gap": float(gap),
            **{name: float(metrics[name]) for name in ("loss", "grad_norm", "entropy")},
        }


def encode(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return a prompt's ids, as a chat where the checkpoint has a template."""
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Return how much better each answer is than its group, in standard deviations; f32[prompts, group] both."""
    spread = rewards.std(axis=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-6)


def batch_of(outputs: Sequence[RequestOutput], advantages: np.ndarray, max_length: int) -> dict[str, Any]:
    """Return all answers as a batch: a row an answer, with the engine's log-probability of each token it sampled."""
    examples, logprobs = [], []
    for output in outputs:
        for answer in output.outputs:
            token_ids = np.array(output.prompt_token_ids + answer.token_ids, np.int32)
            num_prompt = len(output.prompt_token_ids)
            weights = (np.arange(len(token_ids)) >= num_prompt).astype(np.float32)
            examples.append(Example(token_ids, weights))
            row = np.zeros(max_length, np.float32)
            sampled = zip(answer.logprobs, answer.token_ids, strict=True)
            row[num_prompt - 1 : len(token_ids) - 1] = [of_token[token].logprob for of_token, token in sampled]
            logprobs.append(row)
    return {
        "advantages": advantages.reshape(-1, 1).astype(np.float32),
        "logprobs": np.stack(logprobs),
        "tokens": pad_examples(examples, max_length),
    }


def policy_loss(model: nnx.Module, batch: dict[str, Any], *, clip: float) -> LossSums:
    """Return GRPO's clipped loss: probabilities of tokens of better answers go up, up to a ratio of 1 + clip.

    Args:
        model: The model.
        batch: Of `batch_of`.
        clip: See above.
    """
    weights = batch["tokens"].weights  # [B, L]
    logprobs = sampled_logprobs(model, batch)
    ratio = jnp.exp(jnp.where(weights > 0, logprobs - batch["logprobs"], 0.0))
    advantages = batch["advantages"] * weights
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    entropy = jax.lax.stop_gradient(-jnp.sum(jnp.where(weights > 0, logprobs, 0.0)))
    return LossSums(-jnp.sum(gain), jnp.sum(weights), {"entropy": entropy})


def sampled_logprobs(model: nnx.Module, batch: dict[str, Any]) -> jax.Array:
    """Return f32[B, L]: the log-probability of each target by the training form."""
    tokens = batch["tokens"]
    logits = model(tokens.tokens, segment_ids=tokens.segment_ids, positions=tokens.positions)
    return token_logprobs(logits, tokens.targets)


if __name__ == "__main__":
    sys.exit(main())
