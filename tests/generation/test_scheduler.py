"""The scheduler alone: no device, tokens come from a counter."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_paged.generation.pages import PagePool
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.scheduler import Scheduler
from flax_paged.generation.sequence import Sequence, Status

PARAMS = SamplingParams()


def make_sequence(prompt_len, max_tokens=4, *, arrival=0, priority=0, first_token=0, leader=None, index=0):
    prompt = range(first_token, first_token + prompt_len)
    order = {"arrival": arrival, "priority": priority, "index": index}
    sequence = Sequence(str(arrival), prompt, PARAMS, max_num_tokens=prompt_len + max_tokens, **order)
    sequence.leader = leader
    return sequence


def make_scheduler(
    num_pages=32,
    page_size=4,
    *,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    chunk=None,
    cache=True,
    decode_steps=1,
    swap_slots=0,
):
    return Scheduler(
        PagePool(num_pages, page_size, prefix_caching=cache),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=chunk,
        decode_steps_per_call=decode_steps,
        num_swap_slots=swap_slots,
    )


def take_results(scheduler, schedule, token=7):
    for item in schedule.items:
        for _ in range(schedule.num_decode_steps * item.samples):
            if item.sequence.is_finished:
                break
            item.sequence.append(token)
            if item.sequence.finish_reason:
                scheduler.finish(item.sequence, item.sequence.finish_reason)


def rows(schedule):
    return [(item.sequence.request_id, item.context_len, item.num_new_tokens) for item in schedule.items]


def test_prompt_then_decode():
    scheduler = make_scheduler()
    sequence = make_sequence(8)
    scheduler.add(sequence)
    schedule = scheduler.schedule()
    assert rows(schedule) == [("0", 0, 8)] and schedule.items[0].samples
    assert len(sequence.pages) == 2
    take_results(scheduler, schedule)
    # The third page is taken exactly when token 9 is written.
    schedule = scheduler.schedule()
    assert rows(schedule) == [("0", 8, 1)] and len(sequence.pages) == 3


def test_step_ahead_uses_the_pending_token_and_stops_at_the_length_limit():
    scheduler = make_scheduler()
    sequence = make_sequence(3, max_tokens=2)
    scheduler.add(sequence)
    first = scheduler.schedule()
    second = scheduler.schedule()  # before the first one's result is known
    assert rows(second) == [("0", 3, 1)]
    assert not scheduler.schedule().items  # two tokens are pending, and more it may not have
    take_results(scheduler, first)
    take_results(scheduler, second)
    assert sequence.output_token_ids == [7, 7] and sequence.finish_reason == "length"
    assert scheduler.pool.num_live == 0 and not scheduler.has_unfinished


def test_long_prompt_is_cut_into_chunks_and_samples_only_at_its_end():
    scheduler = make_scheduler(chunk=8)
    scheduler.add(make_sequence(23))
    schedules = [scheduler.schedule() for _ in range(3)]
    assert [rows(s)[0] for s in schedules] == [("0", 0, 8), ("0", 8, 8), ("0", 16, 7)]
    assert [s.items[0].samples for s in schedules] == [False, False, True]


def test_decoding_goes_before_prompts_within_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_sequence(4, max_tokens=20, arrival=0))
    take_results(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(40, arrival=1, first_token=100))
    for context in (0, 15):
        schedule = scheduler.schedule()
        assert rows(schedule)[0][0] == "0" and rows(schedule)[1] == ("1", context, 15)
        take_results(scheduler, schedule)


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = make_scheduler(num_pages=4)
    scheduler.add(make_sequence(9, arrival=0))
    take_results(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(8, arrival=1, first_token=100))
    scheduler.add(make_sequence(2, arrival=2, first_token=200))
    assert [r[0] for r in rows(scheduler.schedule())] == ["0"]
    assert scheduler.num_waiting == 2


def test_priority_goes_first():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence(2, arrival=0, priority=1))
    scheduler.add(make_sequence(2, arrival=1, priority=0))
    assert [r[0] for r in rows(scheduler.schedule())] == ["1"]


def test_out_of_pages_preempts_the_last_and_keeps_its_tokens():
    scheduler = make_scheduler(num_pages=4, cache=False)
    first, second = make_sequence(8, 8, arrival=0), make_sequence(8, 4, arrival=1, first_token=100)
    scheduler.add(first)
    scheduler.add(second)
    take_results(scheduler, scheduler.schedule())
    assert scheduler.pool.num_available == 0
    schedule = scheduler.schedule()
    assert rows(schedule) == [("0", 8, 1)] and schedule.preempted == [second]
    assert second.status is Status.WAITING and second.token_ids == [*range(100, 108), 7] and second.pages == []
    while not first.is_finished:
        take_results(scheduler, schedule)
        schedule = scheduler.schedule()
    assert rows(schedule) == [("1", 0, 9)]  # prompt and generated token are computed again
    assert second.num_preemptions == 1


@pytest.mark.parametrize("cache", [True, False])
def test_swapped_out_sequence_goes_on_where_it_was(cache):
    scheduler = make_scheduler(num_pages=4, cache=cache, swap_slots=2)
    first, second = make_sequence(8, 8, arrival=0), make_sequence(7, 4, arrival=1, first_token=100)
    scheduler.add(first)
    scheduler.add(second)
    take_results(scheduler, scheduler.schedule())
    pages = second.pages
    schedule = scheduler.schedule()
    assert schedule.preempted == [second] and second.pages == [] and scheduler.num_swapped_pages == 2
    assert schedule.swap_outs == list(zip(pages, second.swap_slots, strict=True))
    slots = second.swap_slots
    while not first.is_finished:
        take_results(scheduler, schedule)
        schedule = scheduler.schedule()
    assert rows(schedule) == [("1", 7, 1)] and scheduler.num_swapped_pages == 0
    # With a prefix cache, its full page may still be there.
    num_found = 2 - len(schedule.swap_ins)
    assert num_found <= cache
    assert schedule.swap_ins == list(zip(slots[num_found:], second.pages[num_found:], strict=True))


def test_sequence_that_does_not_fit_in_host_memory_is_computed_again():
    scheduler = make_scheduler(num_pages=4, cache=False, swap_slots=1)
    for arrival in range(2):
        scheduler.add(make_sequence(8, arrival=arrival, first_token=100 * arrival))
    take_results(scheduler, scheduler.schedule())
    schedule = scheduler.schedule()
    assert len(schedule.preempted) == 1 and not schedule.swap_outs and scheduler.num_swapped_pages == 0
    assert schedule.preempted[0].num_computed_tokens == 0


@pytest.mark.parametrize("end", ["lost cache", "abort"])
def test_lost_cache_and_abort_free_host_memory(end):
    scheduler = make_scheduler(num_pages=4, cache=False, swap_slots=2)
    sequences = [make_sequence(8, arrival=i, first_token=100 * i) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    take_results(scheduler, scheduler.schedule())
    scheduler.schedule()
    assert scheduler.num_swapped_pages == len(sequences[1].swap_slots) == 2
    if end == "abort":
        scheduler.finish(sequences[1], "abort")
    else:
        scheduler.preempt_all()
        assert sequences[1].num_computed_tokens == 0
    assert scheduler.num_swapped_pages == len(sequences[1].swap_slots) == 0


def test_answer_does_not_fork_off_a_leader_that_is_in_its_prompt_again():
    scheduler = make_scheduler(chunk=8, max_num_seqs=2, cache=False)
    other, leader = make_sequence(3, 9, arrival=0, first_token=100), make_sequence(13, arrival=1)
    fork = make_sequence(13, arrival=1, leader=leader, index=1)
    for sequence in (other, leader, fork):
        scheduler.add(sequence)
    for _ in range(3):
        take_results(scheduler, scheduler.schedule())
    assert leader.output_token_ids and scheduler.waits_for == "max_num_seqs"  # the fork waits, but no more for it
    scheduler.finish(other, "abort")
    scheduler.preempt(leader)
    assert rows(scheduler.schedule()) == [("1", 0, 8), ("1", 0, 8)]


def test_request_that_can_never_fit_is_refused_with_the_arithmetic():
    scheduler = make_scheduler(num_pages=3, page_size=4)
    scheduler.add(make_sequence(8, 5))  # 12 tokens in the cache: just fits
    message = (
        "8 prompt tokens and up to 6 new ones keep 13 tokens in the cache, which takes 4 pages of 4, but num_pages=3"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        scheduler.add(make_sequence(8, 6))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: expected at least 1"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens=7 is less than max_num_seqs=8"),
        ({"chunk": 0}, "max_prefill_chunk=0: expected at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_scheduler(**sizes)


@pytest.mark.parametrize(("prompt_len", "num_cached"), [(3, 0), (8, 4), (9, 8), (12, 8)])
def test_second_equal_prompt_reuses_full_pages_but_computes_its_last_token(prompt_len, num_cached):
    scheduler = make_scheduler()
    first = make_sequence(prompt_len, 1)
    scheduler.add(first)
    take_results(scheduler, scheduler.schedule())
    second = make_sequence(prompt_len, 1, arrival=1)
    scheduler.add(second)
    assert rows(scheduler.schedule()) == [("1", num_cached, prompt_len - num_cached)]
    assert second.num_cached_tokens == num_cached


def test_common_prefix_is_computed_once_even_within_a_step():
    scheduler = make_scheduler(num_pages=64, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(4):
        sequence = make_sequence(16, 2, arrival=i)
        sequence.token_ids += [100 + i]
        sequence.prompt_len += 1
        sequence.max_num_tokens += 1
        scheduler.add(sequence)
    assert rows(scheduler.schedule()) == [("0", 0, 17), ("1", 16, 1), ("2", 16, 1), ("3", 16, 1)]


def test_a_call_has_as_many_decode_steps_as_lengths_and_pages_allow():
    scheduler = make_scheduler(num_pages=4, decode_steps=8)
    long, short = make_sequence(3, max_tokens=7), make_sequence(3, max_tokens=3, arrival=1, first_token=9)
    for sequence in (long, short):
        scheduler.add(sequence)
    steps = []
    while scheduler.has_unfinished:
        schedule = scheduler.schedule()
        take_results(scheduler, schedule)
        steps.append((len(schedule.items), schedule.num_decode_steps, len(long.pages)))
    # The prompts; up to the short one's end; the long one alone, within the three pages that its 9 cached tokens need.
    assert steps == [(2, 1, 1), (2, 2, 2), (1, 4, 0)]
    assert len(long.output_token_ids) == 7 and len(short.output_token_ids) == 3


def test_decode_steps_take_no_page_from_anybody():
    scheduler = make_scheduler(num_pages=2, decode_steps=8)
    sequences = [make_sequence(3, max_tokens=2, arrival=i, first_token=9 * i) for i in range(2)]
    sequences[0].max_num_tokens = 8
    for sequence in sequences:
        scheduler.add(sequence)
    take_results(scheduler, scheduler.schedule())
    schedule = scheduler.schedule()
    assert (schedule.num_decode_steps, schedule.preempted) == (1, [])


requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3), st.integers(1, 3)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_pages=st.integers(8, 14),
    chunk=st.sampled_from([None, 1, 5]),
    cache=st.booleans(),
    steps_ahead=st.booleans(),
    decode_steps=st.sampled_from([1, 3, 8]),
    swap_slots=st.sampled_from([0, 5, 20]),
    data=st.data(),
)
def test_every_request_ends_and_every_page_returns(
    requests, num_pages, chunk, cache, steps_ahead, decode_steps, swap_slots, data
):
    """Random arrivals, priorities, aborts, stops and numbers of answers, in a pool that forces preemption."""
    scheduler = make_scheduler(
        num_pages,
        max_num_batched_tokens=8,
        chunk=chunk,
        cache=cache,
        decode_steps=decode_steps,
        swap_slots=swap_slots,
    )
    written = {}  # (page, offset) -> the (position, tokens up to it) that it was computed for
    host = {}  # likewise, of slots in host memory
    sequences = []
    in_flight = None
    for step in range(2000):
        if step < len(requests):
            prompt_len, max_tokens, priority, first_token, num_answers = requests[step]
            options = {"arrival": step, "priority": priority, "first_token": first_token}
            leader = None
            for index in range(num_answers):
                sequences.append(make_sequence(prompt_len, max_tokens, **options, leader=leader, index=index))
                leader = leader or sequences[-1]
                scheduler.add(sequences[-1])
        if data.draw(st.integers(0, 19)) == 0:
            scheduler.finish(data.draw(st.sampled_from(sequences)), "abort")
        schedule = scheduler.schedule()
        check_schedule(scheduler, schedule)
        write_and_check(schedule, written, host)
        check_slots(scheduler, sequences)
        previous, in_flight = in_flight, schedule
        if steps_ahead and previous:
            take_results(scheduler, previous, token=step % 3)
        if not steps_ahead:
            take_results(scheduler, schedule, token=step % 3)
        if step >= len(requests) and not scheduler.has_unfinished:
            break
    assert all(s.is_finished for s in sequences)
    assert scheduler.pool.num_live == 0 and scheduler.pool.num_available == num_pages
    assert scheduler.num_swapped_pages == 0
    for sequence in sequences:
        if sequence.finish_reason == "length":
            assert len(sequence.token_ids) == sequence.max_num_tokens


def check_schedule(scheduler, schedule):
    assert schedule.num_tokens == sum(item.num_new_tokens for item in schedule.items) <= 8
    assert len({id(item.sequence) for item in schedule.items}) == len(schedule.items) <= 4
    for item in schedule.items:
        assert item.sequence in scheduler.running
        assert len(item.sequence.pages) >= scheduler.pool.pages_for(end_of(item, schedule))
        assert item.sequence.num_tokens <= item.sequence.max_num_tokens
        assert item.is_decode or schedule.num_decode_steps == 1
    held = [page for sequence in scheduler.running for page in sequence.pages]
    assert scheduler.pool.num_live == len(set(held))


def check_slots(scheduler, sequences):
    """Only waiting sequences have slots, each its own."""
    slots = [slot for sequence in sequences for slot in sequence.swap_slots]
    assert len(set(slots)) == len(slots) == scheduler.num_swapped_pages
    assert all(sequence.status is Status.WAITING for sequence in sequences if sequence.swap_slots)


def end_of(item, schedule):
    return item.context_len + item.num_new_tokens + schedule.num_decode_steps - 1


def write_and_check(schedule, written, host):
    """Move and copy pages, then note which prefix each slot's keys were computed for.

    Every slot read must hold the reader's own prefix. A pending token is not known, so a prefix is compared up to the
    tokens known when it was written.
    """
    assert not (schedule.swap_outs and schedule.swap_ins)
    copies = [copy for item in schedule.items for copy in item.page_copies]
    for moves, source, target in (
        (schedule.swap_outs, written, host),
        (schedule.swap_ins, host, written),
        (copies, written, written),
    ):
        moved = {(to, i): source.get((at, i)) for at, to in moves for i in range(4)}
        target.update(moved)
    for item in schedule.items:
        for position in range(item.context_len, end_of(item, schedule)):
            page, offset = item.sequence.pages[position // 4], position % 4
            written[page, offset] = (position, tuple(item.sequence.token_ids[: position + 1]))
    for item in schedule.items:
        for position in range(end_of(item, schedule)):
            page, offset = item.sequence.pages[position // 4], position % 4
            was_position, prefix = written[page, offset]
            assert was_position == position and prefix == tuple(item.sequence.token_ids[: len(prefix)])
