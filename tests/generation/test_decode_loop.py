"""Several decode steps in one call: the same tokens, whatever ends, joins or runs out of pages on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import VOCAB_SIZE, ScriptedModel

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.models.llama import Llama, LlamaConfig

SIZES = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
OPTIONS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "stops": {"temperature": 0, "stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    "logprobs": {"temperature": 0.8, "seed": 1, "logprobs": 3, "prompt_logprobs": 1},
    "min_tokens": {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(30))},
    "bias": {"temperature": 0, "logit_bias": {3: 2.0, 5: -100.0}, "allowed_token_ids": list(range(40))},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "answers": {"temperature": 0.9, "seed": 2, "n": 3},
}


def num_steps_of_calls(engine):
    """Note how many decode steps each call of the engine has from here on."""
    noted = []
    schedule = engine.scheduler.schedule

    def noting():
        result = schedule()
        if result.items:
            noted.append(result.num_decode_steps)
        return result

    engine.scheduler.schedule = noting
    return noted


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(6)
    prompts = [rng.integers(1, VOCAB_SIZE, size).tolist() for size in (1, 4, 7, 8, 13, 20, 29, 3)]
    return prompts, [SamplingParams(max_tokens=int(rng.integers(9, 30)), **options) for options in OPTIONS.values()]


@pytest.fixture(scope="module")
def expected(shared_engine, requests):
    return shared_engine(**SIZES).generate(*requests)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "options", [{"decode_steps_per_call": 3}, {"decode_steps_per_call": 8, "num_pages": 16}], ids=str
)
def test_tokens_are_those_of_single_steps(shared_engine, requests, expected, options, alone):
    engine = shared_engine(**{**SIZES, **options})
    if alone:
        got = [engine.generate([prompt], params)[0] for prompt, params in zip(*requests, strict=True)]
    else:
        got = engine.generate(*requests)
        assert sum(output.metrics.num_preemptions for output in got) > 0 or engine.scheduler.pool.num_pages > 16
    for a, b in zip(got, expected, strict=True):
        for ours, theirs in zip(a.outputs, b.outputs, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            for mine, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert list(mine) == list(other)
                np.testing.assert_allclose(
                    [x.logprob for x in mine.values()], [x.logprob for x in other.values()], 1e-4
                )
    assert engine.scheduler.pool.num_live == 0


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("greedy", [1, 8, 3]),
        ("stops", [1, 8, 3]),
        ("min_tokens", [1, 8, 3]),
        ("bias", [1, 8, 3]),
        ("penalties", [1] * 12),  # the host counts the tokens
    ],
)
def test_number_of_steps(shared_engine, name, calls):
    engine = shared_engine(**SIZES, decode_steps_per_call=8)
    noted = num_steps_of_calls(engine)
    params = SamplingParams(**{"max_tokens": 12, **OPTIONS[name], "stop_token_ids": []})
    assert len(engine.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 12
    assert noted == calls
    del engine.scheduler.schedule


def test_a_bad_word_of_several_tokens_needs_the_host():
    engine = Engine(ScriptedModel([3, 4, 5, 6] * 8), **SIZES, decode_steps_per_call=8)
    engine.add_request([1], SamplingParams(temperature=0, max_tokens=9))
    sequence = next(iter(engine._requests.values())).answers[0].sequence
    sequence.rules._bad_words = [(4, 5)]
    noted = num_steps_of_calls(engine)
    tokens = [token for piece in drain(engine) for token in piece.outputs[0].token_ids]
    assert tokens == [3, 4, 0, 6, 3, 4, 0, 6, 3] and noted == [1] * 9


def drain(engine):
    while engine.has_unfinished_requests:
        yield from engine.step()


def test_what_a_call_computes_past_the_end_is_dropped():
    engine = Engine(ScriptedModel([3, 4, 5, 6, 7, 8] * 8), eos_token_ids=[6], **SIZES, decode_steps_per_call=8)
    pieces = list(engine.stream([[1]], SamplingParams(temperature=0, max_tokens=20)))
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == [3, 4, 5, 6]
    assert pieces[-1].outputs[0].finish_reason == "stop" and engine.stats().num_sampled_tokens == 4
    assert engine.scheduler.pool.num_live == 0


def test_abort_and_arrival_between_calls(shared_engine, requests, expected):
    engine = shared_engine(**SIZES, decode_steps_per_call=3)
    got = {}
    for i in (0, 1, 4):
        engine.add_request(requests[0][i], requests[1][i], request_id=str(i))
    for call in range(50):
        if call == 3:
            engine.abort("4")
            engine.add_request(requests[0][5], requests[1][5], request_id="5")
        for piece in engine.step():
            got.setdefault(int(piece.request_id), []).extend(piece.outputs[0].token_ids)
        if not engine.has_unfinished_requests:
            break
    for i, tokens in got.items():
        whole = expected[i].outputs[0].token_ids
        assert tokens == (whole[: len(tokens)] if i == 4 else whole)
    assert engine.scheduler.pool.num_live == 0


def test_no_compilation_after_warmup(model, requests):
    engine = Engine(model, **SIZES, decode_steps_per_call=4)
    engine.warmup(progress=False)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        engine.generate(*requests)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]
    assert engine.num_traces == len(engine._runner.buckets.all()) + 1


def test_what_cannot_be(model):
    with pytest.raises(ValueError, match="decode_steps_per_call=0: expected at least 1"):
        Engine(model, **SIZES, decode_steps_per_call=0)
    with pytest.raises(ValueError, match="expected one of the two"):
        Engine(model, **SIZES, decode_steps_per_call=2, num_speculative_tokens=2)


def test_weights_are_not_widened_for_every_call():
    """Hoisted out of the loop, a float32 copy of a 16-bit embedding would be written at each call."""
    config = LlamaConfig(
        vocab_size=32768,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    runner = Engine(model, **SIZES, decode_steps_per_call=4)._runner
    bucket = runner.buckets.all()[0]
    arguments = (runner._batch([], bucket), runner._last_token_ids)
    one, loop = runner._step.lower(*arguments), runner._decode_steps.lower(*arguments, np.int32(1))
    temporary = [lowered.compile().memory_analysis().temp_size_in_bytes for lowered in (one, loop)]
    assert temporary[1] - temporary[0] < model.embed_tokens.weight.nbytes // 2
