"""The engine end to end on small models: its tokens are those of a plain loop, whatever the batch looks like."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import VOCAB_SIZE, ScriptedModel, ToyModel, greedy_reference, letter_tokenizer

from flax_paged.cache import KVCache
from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, seed=42, max_tokens=12)


def make_prompts(*sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE - 1, size).tolist() for size in sizes]


PROMPTS = make_prompts(1, 3, 8, 9, 16, 17, 33, 40)


def make_engine(model, tokenizer=None, **options):
    sizes = {
        "num_pages": 64,
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    return Engine(model, tokenizer, **{**sizes, **options})


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def tokens_in(pieces):
    return [token for piece in pieces for token in piece.outputs[0].token_ids]


def fill_cache(engine, value):
    def fill(model):
        for _, cache in nnx.to_flat_state(nnx.state(model, KVCache)):
            cache[...] = jnp.full_like(cache[...], value)

    engine._runner._step.with_function(fill)()


@pytest.fixture(scope="module")
def expected(model):
    return [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "num_pages": 256},
        {"page_size": 32, "num_pages": 8},
        {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        {"max_num_seqs": 1, "max_num_batched_tokens": 7},
        {"max_prefill_chunk": 5},
        {"max_prefill_chunk": 8, "enable_prefix_caching": False},
        {"num_pages": 16},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_full_recomputation(expected, options, shared_engine):
    engine = shared_engine(**options)
    fill_cache(engine, jnp.nan)  # no unwritten slot may be read
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
    for prompt, tokens in zip(PROMPTS[2:5], expected[2:5], strict=True):
        assert tokens_of(engine.generate([prompt], GREEDY)) == [tokens]
    assert engine.scheduler.pool.num_live == 0


@pytest.mark.parametrize("chunk", [8, 5])
def test_a_prompt_in_chunks_gives_the_logits_of_one_piece(shared_engine, chunk):
    """A prompt of 23 in pages of 4, alone and among neighbours."""
    prompt = make_prompts(23)[0]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=20)
    whole = shared_engine(max_num_seqs=1, max_num_batched_tokens=64).generate([prompt], params)[0].outputs[0]
    for neighbours in ([], PROMPTS[1:4]):
        engine = shared_engine(max_prefill_chunk=chunk)
        answer = engine.generate([*neighbours, prompt], params)[-1].outputs[0]
        assert answer.token_ids == whole.token_ids
        for got, expected in zip(answer.logprobs, whole.logprobs, strict=True):
            assert got.keys() == expected.keys()
            values = [[entry[token].logprob for token in expected] for entry in (got, expected)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)


def test_prompts_at_the_edges_of_every_bucket(model):
    """Buckets of 16, 32 and 37 tokens."""
    engine = make_engine(model, max_num_batched_tokens=37, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in make_prompts(15, 16, 17, 32, 33, 37, 38):
        assert tokens_of(engine.generate([prompt], params)) == [greedy_reference(model, prompt, 1)], len(prompt)


def test_preemption_changes_no_token(expected, shared_engine):
    """Six pages of 4 and two requests of 8 + 12 tokens."""
    engine = shared_engine(num_pages=6, enable_prefix_caching=False)
    prompts = make_prompts(8, 8)
    for params in (GREEDY, SAMPLED):
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        together = engine.generate(prompts, params)
        assert tokens_of(together) == tokens_of(alone)
        assert sum(output.metrics.num_preemptions for output in together) > 0
        assert sum(output.metrics.num_preemptions for output in alone) == 0


def test_seeded_request_is_the_same_in_any_company(shared_engine):
    prompt = PROMPTS[4]
    engine = shared_engine()
    alone = tokens_of(engine.generate([prompt], SAMPLED))[0]
    unseeded = SamplingParams(temperature=0.8, max_tokens=12)
    for position in (0, 5):
        prompts, params = list(PROMPTS[:6]), [unseeded, GREEDY, SAMPLED, unseeded, unseeded, unseeded]
        prompts[position], params[position] = prompt, SAMPLED
        assert tokens_of(engine.generate(prompts, params))[position] == alone
    other = shared_engine(page_size=16, max_num_seqs=2, max_num_batched_tokens=64)
    assert tokens_of(other.generate([prompt], SAMPLED))[0] == alone


def test_unseeded_requests_differ_and_engine_seed_reproduces_them(model):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    runs = [tokens_of(make_engine(model, seed=5).generate([PROMPTS[0]] * 4, params)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_mixed_temperatures(expected, shared_engine):
    engine = shared_engine()
    params = [SamplingParams(temperature=t, top_p=0.9, top_k=5, seed=3, max_tokens=12) for t in (0.0, 1e-8, 0.7)]
    mixed = tokens_of(engine.generate([PROMPTS[4]] * 3, params))
    assert mixed[0] == mixed[1] == expected[4]
    assert mixed[2] == tokens_of(engine.generate([PROMPTS[4]], params[2]))[0]


def test_neighbours_contents_do_not_change_a_bit(model):
    """Same shapes and pages, other neighbours: row 0's logits are equal bit for bit."""

    def logits_of_row_0(neighbour_seed):
        engine = make_engine(model, max_num_batched_tokens=64)
        rng = np.random.default_rng(neighbour_seed)
        prompts = [PROMPTS[3], *rng.integers(1, VOCAB_SIZE - 1, (3, 9)).tolist()]
        for prompt in prompts:
            engine.add_request(prompt, GREEDY)
        rows = []
        while engine.has_unfinished_requests:
            schedule = engine.scheduler.schedule()
            if schedule.items:
                bucket = engine._runner.buckets.choose(schedule)
                batch = engine._runner._batch(schedule.items, bucket)
                step = engine._runner._step.with_function(lambda model, batch: model(batch.tokens, batch.metadata))
                logits = np.asarray(step(batch))
                rows.append(logits[0])
                for item, row in zip(schedule.items, logits, strict=False):
                    request = engine._requests[item.sequence.request_id]
                    request.append(item.sequence, int(row.argmax()))
                    if item.sequence.finish_reason:
                        engine.scheduler.finish(item.sequence, "length")
                        del engine._requests[item.sequence.request_id]
        return np.stack(rows)

    np.testing.assert_array_equal(logits_of_row_0(1), logits_of_row_0(2))


# Stopping


@pytest.mark.parametrize("eos", [7, 9])
def test_stops_at_any_eos_id_and_leaves_it_out_of_the_text(eos):
    model = ScriptedModel([3, 4, 5, eos, 6, 6, 6, 6])
    engine = make_engine(model, letter_tokenizer(), eos_token_ids=[7, 9])
    output = engine.generate("", SamplingParams(temperature=0))[0]
    assert output.prompt_token_ids == [0]  # the beginning-of-sequence token alone
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([3, 4, 5, eos], "CDE")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    ignored = engine.generate("", SamplingParams(temperature=0, ignore_eos=True, max_tokens=6))[0].outputs[0]
    assert ignored.token_ids == [3, 4, 5, eos, 6, 6] and ignored.finish_reason == "length"


def test_eos_ids_come_from_the_tokenizer_unless_given():
    model = ScriptedModel([3, 60, 5, 6])
    assert tokens_of(make_engine(model, letter_tokenizer()).generate("", GREEDY)) == [[3, 60]]
    assert len(tokens_of(make_engine(model, letter_tokenizer(), eos_token_ids=[]).generate("", GREEDY))[0]) == 12
    assert len(tokens_of(make_engine(model).generate([[0]], GREEDY))[0]) == 12


def test_stop_token_ids():
    engine = make_engine(ScriptedModel([3, 4, 5, 6]), letter_tokenizer())
    params = SamplingParams(temperature=0, stop_token_ids=[5])
    answer = engine.generate("", params)[0].outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == ([3, 4, 5], "CD", "stop", 5)


def test_length_limits(shared_engine):
    engine = shared_engine()
    assert len(tokens_of(engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1)))[0]) == 1
    long = engine.generate([PROMPTS[7]], SamplingParams(temperature=0, max_tokens=None))[0]
    assert len(long.outputs[0].token_ids) == 64 - 40 and long.outputs[0].finish_reason == "length"


# Streaming, aborting, adding while running


def test_stream_gives_the_pieces_of_generate(model):
    engine = make_engine(model, letter_tokenizer(), eos_token_ids=[])
    whole = engine.generate(PROMPTS[:6], GREEDY)
    texts, tokens, finished = {}, {}, []
    for piece in engine.stream(PROMPTS[:6], GREEDY):
        i = int(piece.request_id) - 6
        texts[i] = texts.get(i, "") + piece.outputs[0].text
        tokens[i] = tokens.get(i, []) + piece.outputs[0].token_ids
        finished += [i] * piece.finished
    assert sorted(finished) == list(range(6))
    for i, output in enumerate(whole):
        assert (texts[i], tokens[i]) == (output.outputs[0].text, output.outputs[0].token_ids)


def test_requests_may_come_and_go_while_others_run(expected, shared_engine):
    engine = shared_engine()
    got = {}
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:4]]
    for step in range(200):
        if step == 3:
            engine.abort(names[1])
            names.append(engine.add_request(PROMPTS[6], GREEDY, request_id="late", priority=-1))
        for piece in engine.step():
            got[piece.request_id] = got.get(piece.request_id, []) + piece.outputs[0].token_ids
        if not engine.has_unfinished_requests:
            break
    assert [got[names[i]] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    assert got["late"] == expected[6]
    assert len(got.get(names[1], [])) < 12 and engine.scheduler.pool.num_live == 0


def test_closing_a_stream_aborts_its_requests(shared_engine):
    engine = shared_engine()
    stream = engine.stream(PROMPTS[:2], GREEDY)
    next(stream)
    stream.close()
    assert not engine.has_unfinished_requests and engine.scheduler.pool.num_live == 0


def test_generate_inside_a_stream(expected, shared_engine):
    engine = shared_engine()
    stream = engine.stream([PROMPTS[2]], GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    assert tokens_of(engine.generate([PROMPTS[5]], GREEDY)) == [expected[5]]
    for piece in stream:
        tokens += piece.outputs[0].token_ids
    assert tokens == expected[2]


# One model, several owners


def test_two_engines_share_a_model_and_leave_it_whole(model, expected):
    engines = [make_engine(model), make_engine(model, page_size=8)]
    streams = [engine.stream([prompt], GREEDY) for engine, prompt in zip(engines, PROMPTS, strict=False)]
    got = [[], []]
    for pieces in zip(*streams, strict=True):
        for tokens, piece in zip(got, pieces, strict=True):
            tokens += piece.outputs[0].token_ids
    assert got == expected[:2]
    assert not jax.tree.leaves(nnx.state(model, KVCache))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))


def test_no_tracer_stays_in_a_variable(model):
    with jax.checking_leaks():
        engine = make_engine(model)
        engine.generate(PROMPTS[:2], GREEDY)
    for module in (model, engine._runner._step.module()):
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(module)))


def test_new_weights_need_no_compilation_and_no_old_cache(model):
    other = ToyModel(seed=1)
    engine = make_engine(model)
    before = tokens_of(engine.generate([PROMPTS[7]], GREEDY))
    num_traces = engine.num_traces
    engine.update_weights(other)
    output = engine.generate([PROMPTS[7]], GREEDY)[0]
    assert output.num_cached_tokens == 0 and engine.num_traces == num_traces
    assert output.outputs[0].token_ids == greedy_reference(other, PROMPTS[7], 12) != before[0]


def test_new_weights_while_requests_run(model):
    """What was said stays; what follows is what the new weights make of it."""
    other = ToyModel(seed=1)
    engine = make_engine(model)
    stream = engine.stream([PROMPTS[4]], GREEDY)
    said = list(next(stream).outputs[0].token_ids)
    engine.update_weights(other)
    rest = [token for piece in stream for token in piece.outputs[0].token_ids]
    old = greedy_reference(model, PROMPTS[4], 12)
    num_old = next(
        i for i in range(13) if said + rest == old[:i] + greedy_reference(other, PROMPTS[4] + old[:i], 12 - i)
    )
    assert 1 <= num_old <= 3


@pytest.mark.parametrize("when", ["launch", "after the cache is consumed", "result"])
def test_engine_survives_a_failed_step(model, expected, when, monkeypatch):
    engine = make_engine(model)
    running = engine.add_request(PROMPTS[3], GREEDY)
    pieces = [piece for _ in range(4) for piece in engine.step()]
    runner = engine._runner
    step = runner._step

    def fail(*args):
        if when == "after the cache is consumed":
            step(*args)
            for cache in step._leaves.caches:
                cache.delete()
        raise FloatingPointError("boom")

    with monkeypatch.context() as patch:
        if when == "result":
            patch.setattr(engine, "_postprocess", fail)
        else:
            patch.setattr(runner, "_step", Failing(step, fail))
        with pytest.raises(FloatingPointError, match="boom"):
            engine.generate([PROMPTS[1]], GREEDY)
    assert list(engine._requests) == [running]
    assert tokens_of(engine.generate([PROMPTS[4]], GREEDY)) == [expected[4]]
    assert tokens_in(pieces + drain(engine)) == expected[3]


class Failing:
    def __init__(self, step, call):
        self.step, self.call = step, call

    def __getattr__(self, name):
        return getattr(self.step, name)

    def __call__(self, *args):
        return self.call(*args)


def drain(engine):
    pieces = engine.step()
    while engine.has_unfinished_requests:
        pieces += engine.step()
    return pieces


# Compilation


def test_nothing_is_compiled_after_warmup(model, caplog):
    engine = make_engine(model, max_num_seqs=6, max_num_batched_tokens=37, page_size=16)
    engine.warmup(progress=False)
    assert engine.num_traces == len(engine._runner.buckets.all()) + 1  # and the copying of pages
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for batch in (1, 2, 5, 7):
            prompts = make_prompts(*range(1, 64, 64 // batch))
            engine.generate(prompts, [GREEDY, SAMPLED] * (len(prompts) // 2) + [GREEDY] * (len(prompts) % 2))
    assert not [record for record in caplog.records if "engine_step" in record.getMessage()]
    assert engine.num_traces == len(engine._runner.buckets.all()) + 1


def test_warmup_leaves_the_cache_untouched(model):
    engine = make_engine(model)
    engine.generate(PROMPTS, GREEDY)
    before = [np.asarray(leaf) for leaf in engine._runner._step._leaves.caches]
    engine.warmup(progress=False)
    for old, new in zip(before, engine._runner._step._leaves.caches, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_stderr_if_someone_watches(shared_engine, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    engine = shared_engine()
    engine.warmup()
    engine.generate(PROMPTS[:2], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all((bar in captured.err) == is_terminal for bar in ("Compiling", "Generating", "2/2"))


def test_no_bucket_is_larger_than_the_budget(model):
    for budget in (16, 31, 317):
        buckets = make_engine(model, max_num_batched_tokens=budget)._runner.buckets.all()
        assert max(bucket.num_tokens for bucket in buckets) == budget
        assert max(bucket.num_seqs for bucket in buckets) == 4


# Bad input


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "The prompt has no tokens"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}; expected 0 <= id < {VOCAB_SIZE}"),
        ([1, -1], {}, "token id -1; expected 0 <= id"),
        ([1, 2.5], {}, "2.5; expected text or a list of integer token ids"),
        ("text", {}, "the engine has no tokenizer"),
        ([1] * 64, {}, "The prompt has 64 tokens and max_model_len=64 must hold at least one more"),
        (
            [1] * 30,
            {"max_tokens": 16},
            "The request can never run: 30 prompt tokens and up to 16 new ones keep 45 tokens",
        ),
    ],
)
def test_bad_prompt_is_refused_and_the_others_go_on(expected, prompt, params, message, shared_engine):
    engine = shared_engine(num_pages=10)
    engine.add_request(PROMPTS[3], GREEDY)
    pieces = engine.step() + engine.step()
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.add_request(prompt, SamplingParams(**params))
    with pytest.raises(ValueError, match=re.escape("prompts[1]: ")):
        engine.generate([[1], prompt], SamplingParams(**params))
    assert tokens_in(pieces + drain(engine)) == expected[3]


def test_empty_text_without_bos_is_refused(model):
    engine = make_engine(model, letter_tokenizer(adds_bos=False))
    with pytest.raises(ValueError, match="The prompt has no tokens"):
        engine.generate("", GREEDY)
    assert engine.generate("A", GREEDY)[0].prompt_token_ids == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 0}, "num_pages=0"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is less than max_num_seqs=4"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"num_pages": 2**20, "page_size": 2**12}, "more than the 2147483647 that an int32 slot number can address"),
        ({"eos_token_ids": [61]}, "eos_token_ids"),
        ({"kv_cache_dtype": jnp.int16}, "int16"),
    ],
)
def test_engine_sizes_that_cannot_work_are_refused(model, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_engine(model, **options)


def test_model_without_logits_is_refused():
    class Hidden(ScriptedModel):
        def __call__(self, tokens, metadata):
            return super().__call__(tokens, metadata)[:, None]

    with pytest.raises(ValueError, match=re.escape("expected logits of shape [1, vocab_size]")):
        make_engine(Hidden([1, 2]))


def test_lists_of_unequal_length_are_refused(shared_engine):
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        shared_engine().generate([[1], [2]], [GREEDY])
    with pytest.raises(TypeError, match="expected SamplingParams"):
        shared_engine().generate([[1]], [{"temperature": 0}])


def test_request_id_in_use_is_refused(shared_engine):
    engine = shared_engine()
    engine.add_request([1], request_id="a")
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        engine.add_request([1], request_id="a")
    engine.abort("a")


def test_default_pool_is_enough_for_one_sequence_at_least(model):
    engine = Engine(model, max_model_len=64, max_num_seqs=3)
    assert engine.scheduler.pool.num_pages == 3 * 4


def test_cache_dtype_is_the_models_unless_asked_for():
    bf16 = ToyModel(dtype=jnp.bfloat16)
    # Before JAX 0.12 a CPU cannot update a 16-bit cache in place, so there the default is float32.
    expected = jnp.float32 if jax.__version_info__ < (0, 12) else jnp.bfloat16
    assert make_engine(bf16)._runner._step._leaves.caches[0].dtype == expected
    assert make_engine(bf16, kv_cache_dtype=jnp.bfloat16)._runner._step._leaves.caches[0].dtype == jnp.bfloat16
    assert make_engine(bf16, kv_cache_dtype=jnp.float32)._runner._step._leaves.caches[0].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_gives_the_same_alone_in_a_batch_and_after_preemption(model, dtype):
    engine = make_engine(model, kv_cache_dtype=dtype)
    together = tokens_of(engine.generate(PROMPTS, GREEDY))
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == together  # from the prefix cache
    alone = make_engine(model, kv_cache_dtype=dtype, enable_prefix_caching=False, num_pages=14)
    assert [tokens_of(alone.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == together
    assert tokens_of(alone.generate(PROMPTS[:4], GREEDY)) == together[:4]
    assert alone.stats().num_preemptions > 0
