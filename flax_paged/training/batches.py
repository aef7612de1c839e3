"""From tokenized examples to the padded arrays of a training step: packing, padding, order."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Example(NamedTuple):
    """One tokenized example.

    Fields:
        token_ids: i32[n], n >= 2.
        weights: f32[n]. How much the prediction of each token counts; the first one is never predicted.
    """

    token_ids: np.ndarray
    weights: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """B rows of L tokens and the token to be predicted after each.

    Fields:
        tokens: i32[B, L]. Token ids; 0 in padding.
        targets: i32[B, L]. The next token of the same example; 0 in padding.
        weights: f32[B, L]. How much each prediction counts; 0 in padding and where the target is not to be learnt.
        segment_ids: i32[B, L]. 1, 2, ... for the examples of a row, 0 in padding.
        positions: i32[B, L]. Position within the example.
    """

    tokens: Any  # i32[B, L]
    targets: Any  # i32[B, L]
    weights: Any  # f32[B, L]
    segment_ids: Any  # i32[B, L]
    positions: Any  # i32[B, L]


# Rows that a further example may still go into. More would fill rows a little better and take longer.
_MAX_OPEN_ROWS = 64


def pack_examples(examples: Iterable[Example], max_length: int) -> TokenBatch:
    """Put several examples in a row where they fit, each into the first row that has room.

    Args:
        examples: An example of n tokens takes n - 1 places: its last token is only a target.
        max_length: L.

    Returns:
        TokenBatch of numpy arrays; B is what it takes.

    Raises:
        ValueError: There is no example, or one is too short or too long.
    """
    rows: list[list[Example]] = []
    open_rows: list[tuple[list[Example], int]] = []
    for example in _checked(examples, max_length):
        size = len(example.token_ids) - 1
        for i, (row, room) in enumerate(open_rows):
            if size <= room:
                row.append(example)
                open_rows[i] = (row, room - size)
                break
        else:
            rows.append([example])
            open_rows.append((rows[-1], max_length - size))
        open_rows = [(row, room) for row, room in open_rows if room][-_MAX_OPEN_ROWS:]
    return _build(rows, max_length)


def pad_examples(examples: Iterable[Example], max_length: int) -> TokenBatch:
    """Give every example a row of its own; arguments and result as in `pack_examples`."""
    return _build([[example] for example in _checked(examples, max_length)], max_length)


def training_batches(rows: TokenBatch, batch_size: int, *, seed: int):
    """Return the batches of a training run, without end, as a `grain.MapDataset`.

    `batches[i]` is the batch of step i, whatever was read before, so a run is resumed with the number of its step. The
    rows are shuffled anew in every pass; a batch that begins in one pass ends in the next, so that no row is dropped.

    Args:
        rows: TokenBatch of numpy arrays, of all rows.
        batch_size: Rows of a batch.
        seed: Of the order.

    Returns:
        A `grain.MapDataset` of `TokenBatch`.

    Raises:
        ValueError: `batch_size` is less than 1.
        ImportError: grain is not installed.
    """
    if batch_size < 1:
        raise ValueError(f"training_batches({batch_size=}): expected at least 1.")
    try:
        import grain
    except ImportError:
        raise ImportError("Training data needs grain: pip install 'flax-paged[train]'.") from None
    order = grain.MapDataset.range(len(rows.tokens)).seed(seed).shuffle().repeat()
    return order.batch(batch_size).map(lambda index: take_rows(rows, index))


def evaluation_batches(rows: TokenBatch, batch_size: int) -> Iterator[TokenBatch]:
    """Yield all rows in order, `batch_size` at a time; the last batch is filled up with rows of padding."""
    for start in range(0, len(rows.tokens), batch_size):
        batch = take_rows(rows, slice(start, start + batch_size))
        missing = batch_size - len(batch.tokens)
        yield jax.tree.map(lambda x, missing=missing: np.pad(x, ((0, missing), (0, 0))), batch)


def take_rows(rows: TokenBatch, index) -> TokenBatch:
    """Return some of the rows: `index` is a slice or i[B]."""
    return jax.tree.map(lambda x: x[index], rows)


def _checked(examples: Iterable[Example], max_length: int) -> Iterator[Example]:
    if max_length < 1:
        raise ValueError(f"{max_length=}: expected at least 1.")
    for i, (token_ids, weights) in enumerate(examples):
        if len(token_ids) != len(weights):
            raise ValueError(f"examples[{i}] has {len(token_ids)} tokens and {len(weights)} weights; expected as many.")
        if not 2 <= len(token_ids) <= max_length + 1:
            raise ValueError(
                f"examples[{i}] has {len(token_ids)} tokens; expected 2 to max_length + 1 = {max_length + 1}."
            )
        yield Example(token_ids, weights)


def _build(rows: Sequence[Sequence[Example]], max_length: int) -> TokenBatch:
    if not rows:
        raise ValueError("There are no examples; expected at least one.")
    shape = (len(rows), max_length)
    tokens, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row, 1):
            place = (i, slice(start, start + len(example.token_ids) - 1))
            tokens[place] = example.token_ids[:-1]
            targets[place] = example.token_ids[1:]
            weights[place] = example.weights[1:]
            segment_ids[place] = segment
            positions[place] = np.arange(len(example.token_ids) - 1)
            start = place[1].stop
    return TokenBatch(tokens, targets, weights, segment_ids, positions)
