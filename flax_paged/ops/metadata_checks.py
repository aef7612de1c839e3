"""Host-side checks of a step's metadata by value: what a compiled step cannot check for itself."""

from typing import Any

import numpy as np


def check_metadata_values(
    seq_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    *,
    num_pages: int,
    page_size: int,
    num_tokens: int,
    slot_mapping: Any = None,
    num_kv_update_slices: Any = None,
) -> None:
    """Check metadata whose shapes are right for values that would read or write the wrong memory.

    Compiled steps clamp or drop what is out of range, silently. Call this on the host in tests or while debugging.

    Args:
        seq_lens: i32[S].
        block_tables: i32[S, P].
        query_start_loc: i32[S + 1].
        num_seqs: i32[1].
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        num_tokens: T, rows of q.
        slot_mapping: i32[3, U] or None to leave cache writes unchecked.
        num_kv_update_slices: i32[1], with slot_mapping.

    Raises:
        ValueError: Naming the first sequence or slice that is wrong.
    """
    seq_lens, block_tables, starts = (np.asarray(a) for a in (seq_lens, block_tables, query_start_loc))
    num_live = int(np.asarray(num_seqs)[0])
    if not 0 <= num_live <= len(seq_lens):
        raise ValueError(f"num_seqs={num_live}: expected 0 to max_num_seqs={len(seq_lens)}.")
    if starts[0] != 0:
        raise ValueError(f"query_start_loc[0]={starts[0]}: expected 0.")
    if starts[num_live] > num_tokens:
        raise ValueError(f"query_start_loc[{num_live}]={starts[num_live]}: expected at most {num_tokens=}.")
    for i in range(num_live):
        _check_sequence(i, int(seq_lens[i]), block_tables[i], int(starts[i + 1] - starts[i]), num_pages, page_size)
    if slot_mapping is not None:
        num_slices = int(np.asarray(num_kv_update_slices)[0])
        _check_slices(np.asarray(slot_mapping), num_slices, num_pages, page_size, num_tokens)


def _check_sequence(i, seq_len, table, query_len, num_pages, page_size):
    if query_len < 0:
        raise ValueError(f"query_start_loc[{i + 1}] is {-query_len} less than query_start_loc[{i}]: expected no less.")
    if seq_len < query_len:
        raise ValueError(
            f"seq_lens[{i}]={seq_len} is less than its {query_len} queries: expected context + queries, not the context"
            " alone."
        )
    num_needed = -(-seq_len // page_size)
    if num_needed > len(table):
        raise ValueError(f"seq_lens[{i}]={seq_len} needs {num_needed} pages, but block_tables has {len(table)} a row.")
    wrong = [int(page) for page in table[:num_needed] if not 0 <= page < num_pages]
    if wrong:
        raise ValueError(f"block_tables[{i}] holds page id {wrong[0]}: expected 0 <= id < {num_pages=}.")


def _check_slices(slot_mapping, num_slices, num_pages, page_size, num_tokens):
    if not 0 <= num_slices <= slot_mapping.shape[1]:
        raise ValueError(f"num_kv_update_slices={num_slices}: expected 0 to {slot_mapping.shape[1]} columns.")
    for u, (slot, token, length) in enumerate(slot_mapping[:, :num_slices].T.tolist()):
        where = f"slot_mapping[:, {u}]={[slot, token, length]}"
        if not 0 <= slot < num_pages * page_size:
            raise ValueError(f"{where}: expected a first slot within the {num_pages * page_size} slots.")
        if length < 0 or slot % page_size + length > page_size:
            raise ValueError(f"{where}: expected a slice within one page of {page_size} tokens; split it.")
        if token < 0 or token + length > num_tokens:
            raise ValueError(f"{where}: expected tokens within {num_tokens=}.")
