"""Random requests on a Llama: greedy tokens are those of one request at a time, and nothing is compiled or lost.

CI runs two settings on few and shorter requests. FLAX_PAGED_ALL_REQUESTS=200 runs every setting on so many of up to
700 tokens. FLAX_PAGED_ALL_REQUESTS_SMOLLM2=10 runs every setting on ten of its own with SmolLM2: 200 in all.
"""

import gc
import itertools
import math
import os

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from flax import nnx

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.loading import load_model
from flax_paged.models.llama import Llama, LlamaConfig

NUM_ALL, NUM_ALL_SMOLLM2 = (int(os.environ.get(f"FLAX_PAGED_ALL_REQUESTS{name}", 0)) for name in ("", "_SMOLLM2"))
IS_WHOLE = bool(NUM_ALL or NUM_ALL_SMOLLM2)
MAX_PROMPT, MAX_TOKENS = 700 if IS_WHOLE else 220, 32
MAX_MODEL_LEN = MAX_PROMPT + MAX_TOKENS
# Little more than the longest request, so that sequences take pages from each other.
POOL_TOKENS = MAX_MODEL_LEN + 36
SIZES = {
    "max_num_seqs": 8 if NUM_ALL else 4,
    "max_num_batched_tokens": 128 if NUM_ALL else 64 if NUM_ALL_SMOLLM2 else 32,
    "max_model_len": MAX_MODEL_LEN,
    "max_logprobs": 0,
}
# Two logits nearer than this may change places by rounding, which depends on the shape of the step.
NEAR_TIE = 1e-3

NAMES = (
    "max_prefill_chunk",
    "page_size",
    "enable_prefix_caching",
    "num_speculative_tokens",
    "decode_steps_per_call",
    "swap_space",
)
SWAP_SPACE = 2**26
ALL = [
    (*setting, 1, SWAP_SPACE * ((i + i // 2 + i // 4) % 2))  # half of them, with and without each of the others
    for i, setting in enumerate(itertools.product([1, 16, 64], [4, 16, 32], [True, False], [0, 3]))
] + [(64, 4, True, 0, 4, 0), (16, 32, False, 0, 8, SWAP_SPACE)]
PRUNED = [(1, 4, True, 3, 1, SWAP_SPACE), (64, 16, False, 0, 4, 0)]


def random_requests(vocab_size, num_requests, seed):
    """Prompts of 1 to 700 tokens, most of them short; half begin with part of one of three texts.

    The first and the third nearly fill the pool: their answers do not fit beside each other.
    """
    rng = np.random.default_rng(seed)
    texts = rng.integers(1, vocab_size, (3, MAX_PROMPT)).tolist()
    prompts = []
    for i in range(num_requests):
        prompt_len = rng.integers(1, (40, MAX_PROMPT // 2, MAX_PROMPT + 1)[i % 3])
        if i in (0, 2):
            prompt_len = POOL_TOKENS // 2 - 4
        shared = texts[rng.integers(3)][: rng.integers(1, MAX_PROMPT)] if i % 2 else []
        prompts.append((shared + rng.integers(1, vocab_size, prompt_len).tolist())[: max(prompt_len, 2)])
    return prompts


def engine_for_one(model):
    """Make an engine that has only one request at a time, in one page."""
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "page_size": MAX_MODEL_LEN, "num_pages": 1}
    return Engine(model, **sizes, max_model_len=MAX_MODEL_LEN, max_logprobs=2, enable_prefix_caching=False)


def one_at_a_time(engine, prompts):
    """Each prompt's greedy tokens by itself, up to the first that is nearly a tie."""
    answers = []
    for prompt in prompts:
        answer = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2))
        best = [sorted(entry.values(), key=lambda x: x.rank) for entry in answer[0].outputs[0].logprobs]
        is_clear = [first.logprob - second.logprob > NEAR_TIE for first, second, *_ in best]
        answers.append(answer[0].outputs[0].token_ids[: [*is_clear, False].index(False)])
    return answers


def run_all(engine, prompts, answers, rng):
    """Feed the requests at random times, abort some; returns what each said, and which were aborted."""
    waiting = [i for i, answer in enumerate(answers) if answer]
    said, aborted, running = {i: [] for i in waiting}, set(), set()
    abort_at = {}
    for step in itertools.count():
        if not waiting and not engine.has_unfinished_requests:
            return said, aborted
        for _ in range(rng.integers(0, 3) if step else 3):
            if waiting:
                i = waiting.pop(0)
                params = SamplingParams(temperature=0, max_tokens=len(answers[i]))
                engine.add_request(prompts[i], params, request_id=str(i), priority=int(rng.integers(0, 2)))
                running.add(i)
                if i > 2 and rng.integers(0, 4) == 0:
                    abort_at[i] = step + rng.integers(0, 100)
        for i in [i for i in running if step >= abort_at.get(i, math.inf)]:
            engine.abort(str(i))
            aborted.add(i)
            running.remove(i)
        for piece in engine.step():
            said[int(piece.request_id)] += piece.outputs[0].token_ids
            if piece.finished:
                running.remove(int(piece.request_id))


def check(model, prompts, answers, setting):
    options = dict(zip(NAMES, setting, strict=True))
    engine = Engine(model, **SIZES, **options, num_pages=POOL_TOKENS // options["page_size"])
    engine.warmup(progress=False)
    with counted_compilations() as compiled:
        said, aborted = run_all(engine, prompts, answers, np.random.default_rng(3))
    wrong = [i for i, tokens in said.items() if tokens != answers[i][: len(tokens) if i in aborted else None]]
    assert not wrong
    assert aborted
    assert not compiled
    stats = engine.stats()
    assert (stats.num_live_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_free_pages + stats.num_cached_pages == engine.scheduler.pool.num_pages
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out_pages > 0) == (options["swap_space"] > 0)
    assert stats.num_swapped_pages == 0
    assert (stats.num_cached_tokens > 0) == options["enable_prefix_caching"]
    assert (stats.num_draft_tokens > 0) == (options["num_speculative_tokens"] > 0)
    return stats


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.4,
    )
    return Llama(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def requests(llama):
    prompts = random_requests(128, NUM_ALL or 16, seed=0)
    answers = one_at_a_time(engine_for_one(llama), prompts)
    assert np.mean([len(answer) for answer in answers]) > MAX_TOKENS / 2  # near ties are rare
    return prompts, answers


@pytest.mark.parametrize("setting", ALL if NUM_ALL else PRUNED, ids=str)
def test_random_llama(llama, requests, setting):
    print(setting, check(llama, *requests, setting))


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    model = load_model(smollm2_path)
    return model, engine_for_one(model)


@pytest.mark.smollm2
@pytest.mark.skipif(not NUM_ALL_SMOLLM2, reason="takes long; asked for by FLAX_PAGED_ALL_REQUESTS_SMOLLM2")
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_smollm2(smollm2, setting):
    model, alone = smollm2
    prompts = random_requests(49152, NUM_ALL_SMOLLM2, seed=ALL.index(setting))
    print(setting, check(model, prompts, one_at_a_time(alone, prompts), setting), flush=True)
    jax.clear_caches()  # programs of one setting alone: all together are more than a process may map
    gc.collect()
