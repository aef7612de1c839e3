"""Train the module that is served: losses, steps, data, adapters."""

from flax_paged.training.batches import (
    Example,
    TokenBatch,
    evaluation_batches,
    pack_examples,
    pad_examples,
    training_batches,
)
from flax_paged.training.losses import LossSums, cross_entropy, next_token_loss, token_logprobs
from flax_paged.training.optimizers import adamw, learning_rate_schedule
from flax_paged.training.step import Evaluator, TrainStep

__all__ = [
    "Evaluator",
    "Example",
    "LossSums",
    "TokenBatch",
    "TrainStep",
    "adamw",
    "cross_entropy",
    "evaluation_batches",
    "learning_rate_schedule",
    "next_token_loss",
    "pack_examples",
    "pad_examples",
    "token_logprobs",
    "training_batches",
]
