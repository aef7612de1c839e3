"""Train the module that is served: losses, steps, data, adapters."""

from flax_paged.training.adapter_files import load_adapter, read_adapter, save_adapter
from flax_paged.training.adapters import (
    DEFAULT_TARGETS,
    add_lora,
    has_lora,
    lora_of,
    merge_lora,
    remove_lora,
    stack_lora,
)
from flax_paged.training.batches import (
    Example,
    TokenBatch,
    evaluation_batches,
    pack_examples,
    pad_examples,
    training_batches,
)
from flax_paged.training.data import DataReport, chat_example, read_examples
from flax_paged.training.losses import LossSums, cross_entropy, next_token_loss, token_logprobs
from flax_paged.training.optimizers import adamw, learning_rate_schedule
from flax_paged.training.step import Evaluator, TrainStep

__all__ = [
    "DEFAULT_TARGETS",
    "DataReport",
    "Evaluator",
    "Example",
    "LossSums",
    "TokenBatch",
    "TrainStep",
    "adamw",
    "add_lora",
    "chat_example",
    "cross_entropy",
    "evaluation_batches",
    "has_lora",
    "learning_rate_schedule",
    "load_adapter",
    "lora_of",
    "merge_lora",
    "next_token_loss",
    "pack_examples",
    "pad_examples",
    "read_adapter",
    "read_examples",
    "remove_lora",
    "save_adapter",
    "stack_lora",
    "token_logprobs",
    "training_batches",
]
