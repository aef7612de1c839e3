"""The engine behind asyncio."""

import asyncio
import time

import numpy as np
import pytest
from toy import VOCAB_SIZE

from flax_paged.generation.async_engine import AsyncEngine, QueueTimeoutError, RequestTimeoutError
from flax_paged.generation.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [np.random.default_rng(i).integers(1, VOCAB_SIZE, 5 + i).tolist() for i in range(6)]


async def collect(server, prompt, params=PARAMS, **options):
    tokens = []
    async for piece in server.generate(prompt, params, **options):
        tokens += piece.outputs[0].token_ids
    return tokens


@pytest.fixture
def slow_engine(shared_engine, monkeypatch):
    """An engine that cannot have finished when a test goes on."""
    engine = shared_engine()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    return engine


def test_many_coroutines_get_their_own_tokens(shared_engine):
    engine = shared_engine()
    expected = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]

    async def main():
        async with AsyncEngine(engine) as server:
            first = await asyncio.gather(*(collect(server, prompt) for prompt in PROMPTS))
            second = await collect(server, PROMPTS[0], request_id="again", priority=-1, cache_salt="x")
            return first, second

    first, second = asyncio.run(main())
    assert first == expected and second == expected[0]


def test_bad_request_fails_alone(shared_engine):
    async def main():
        async with AsyncEngine(shared_engine()) as server:
            good = asyncio.create_task(collect(server, PROMPTS[0]))
            with pytest.raises(ValueError, match="The prompt has no tokens"):
                await collect(server, [])
            return await good

    assert len(asyncio.run(main())) == 12


def test_leaving_or_cancelling_aborts(slow_engine):
    engine = slow_engine
    long = SamplingParams(temperature=0, max_tokens=50)

    async def main():
        async with AsyncEngine(engine) as server:
            async for _ in server.generate(PROMPTS[0], long):
                break
            task = asyncio.create_task(collect(server, PROMPTS[1], long))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(500):
                if not engine.has_unfinished_requests:
                    break
                await asyncio.sleep(0.01)
            return engine.scheduler.pool.num_live

    assert asyncio.run(main()) == 0


def test_failed_step_reaches_everyone_and_the_server_goes_on(shared_engine, monkeypatch):
    engine = shared_engine()

    def fail(schedule):
        raise FloatingPointError("boom")

    async def main():
        async with AsyncEngine(engine) as server:
            with monkeypatch.context() as patch:
                patch.setattr(engine._runner, "launch", fail)
                results = await asyncio.gather(*(collect(server, p) for p in PROMPTS[:2]), return_exceptions=True)
            return results, await collect(server, PROMPTS[0])

    results, tokens = asyncio.run(main())
    assert all(isinstance(result, FloatingPointError) for result in results) and len(tokens) == 12


def test_closed_server_refuses(slow_engine):
    async def main():
        server = AsyncEngine(slow_engine)
        task = asyncio.create_task(collect(server, PROMPTS[0], SamplingParams(temperature=0, max_tokens=50)))
        await asyncio.sleep(0.05)
        server.close()
        with pytest.raises(RuntimeError, match="was closed"):
            await task
        with pytest.raises(RuntimeError, match="is closed"):
            await collect(server, PROMPTS[0])

    asyncio.run(main())


def test_a_request_waits_no_longer_than_it_should(slow_engine):
    long = SamplingParams(temperature=0, max_tokens=50)

    async def main():
        async with AsyncEngine(slow_engine) as server:  # of 4 places
            running = [asyncio.create_task(collect(server, prompt, long)) for prompt in PROMPTS[:4]]
            await asyncio.sleep(0)
            while server.num_waiting:
                await asyncio.sleep(0.01)
            hasty = asyncio.create_task(collect(server, PROMPTS[4], long, queue_timeout=0.05))
            patient = asyncio.create_task(collect(server, PROMPTS[5], PARAMS, priority=1, queue_timeout=100))
            await asyncio.sleep(0)
            num_waiting = server.num_waiting
            with pytest.raises(QueueTimeoutError):
                await hasty
            await asyncio.gather(*running)
            return num_waiting, await patient, server.num_waiting

    num_waiting, tokens, num_waiting_at_the_end = asyncio.run(main())
    assert num_waiting == 2 and num_waiting_at_the_end == 0 and len(tokens) == 12


def test_a_request_runs_no_longer_than_it_should(slow_engine):
    async def main():
        async with AsyncEngine(slow_engine) as server:
            with pytest.raises(RequestTimeoutError):
                await collect(server, PROMPTS[0], SamplingParams(temperature=0, max_tokens=50), timeout=0.1)
            return await collect(server, PROMPTS[0], timeout=100)

    assert len(asyncio.run(main())) == 12
    assert slow_engine.stats().num_live_pages == 0
