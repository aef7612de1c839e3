"""Limits, keys and the log, of an application in this process whose engine is slow enough to have a queue."""

import asyncio
import json
import logging
import time

import httpx
import pytest

from flax_paged.generation.grammar import Grammar
from flax_paged.serving import ServerOptions, Service, create_app

BODY = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
QUICK = {"prompt": "Hello", "max_tokens": 2}


@pytest.fixture
def slow_engine(engine, monkeypatch):
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.05) or step())
    return engine


def run(engine, scenario, **options):
    """Run an async function of a client and the service."""

    async def main():
        service = Service(ServerOptions(model_name="tiny", **options))
        if engine is not None:
            service.start(engine)
        transport = httpx.ASGITransport(create_app(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
                async with asyncio.timeout(120):  # the scenarios poll
                    return await scenario(client, service)
        finally:
            await asyncio.to_thread(service.close)
            assert engine is None or engine.stats().num_live_pages == 0

    return asyncio.run(main())


def ask(client, body=QUICK, **options):
    return asyncio.create_task(client.post("/v1/completions", json=body, **options))


def error_of(response):
    return response.json()["error"]


async def until_waiting(service, count):
    while service._engine is None or service._engine.num_waiting != count:
        await asyncio.sleep(0.005)


async def start(client, service, engine, bodies):
    """Ask one after the other, each when the one before it runs, so that nobody waits however busy the machine is."""
    calls = []
    for body in bodies:
        calls.append(ask(client, body))
        while engine.stats().num_running < len(calls) or service._engine.num_waiting:
            assert not calls[-1].done(), calls[-1].result().text
            await asyncio.sleep(0.005)
    return calls


def test_a_full_queue_refuses(slow_engine):
    async def scenario(client, service):
        running = await start(client, service, slow_engine, [BODY] * 4)
        waiting = [ask(client) for _ in range(2)]
        await until_waiting(service, 2)
        refused = await ask(client)
        for task in [*running, *waiting]:
            task.cancel()
        await asyncio.gather(*running, *waiting, return_exceptions=True)
        return refused

    refused = run(slow_engine, scenario, max_num_waiting=2)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    assert "2 prompts are waiting already" in error_of(refused)["message"]
    assert error_of(refused)["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("streams", [False, True])
def test_nobody_waits_longer_than_the_limit(slow_engine, streams):
    async def scenario(client, service):
        running = await start(client, service, slow_engine, [BODY] * 4)
        refused = await ask(client, {**QUICK, "stream": streams})
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return refused

    refused = run(slow_engine, scenario, queue_timeout=1)
    assert refused.status_code == 429 and "waited 1 s without getting a turn" in error_of(refused)["message"]


def test_no_call_takes_longer_than_the_limit(slow_engine):
    async def scenario(client, service):
        return await asyncio.gather(ask(client, BODY), ask(client, {**BODY, "stream": True}))

    whole, streamed = run(slow_engine, scenario, request_timeout=3)
    assert whole.status_code == 504 and "not finished within 3 s" in error_of(whole)["message"]
    *events, error, done = streamed.text.strip().split("\n\n")
    assert streamed.status_code == 200 and len(events) > 1 and done == "data: [DONE]"
    assert "not finished within 3 s" in json.loads(error.removeprefix("data: "))["error"]["message"]


def test_what_runs_at_the_end_is_told(slow_engine):
    async def scenario(client, service):
        calls = await start(client, service, slow_engine, [{**BODY, "stream": streams} for streams in (False, True)])
        num_tokens = slow_engine.stats().num_sampled_tokens + 4
        while slow_engine.stats().num_sampled_tokens < num_tokens:
            await asyncio.sleep(0.005)
        service.refuse("The server is shutting down.")
        refused = await ask(client)
        await asyncio.to_thread(service.close)
        return refused, *await asyncio.gather(*calls)

    refused, whole, streamed = run(slow_engine, scenario)
    assert refused.status_code == whole.status_code == 503
    assert error_of(refused)["message"] == error_of(whole)["message"] == "The server is shutting down."
    *_, error, done = streamed.text.strip().split("\n\n")
    assert done == "data: [DONE]" and "shutting down" in error


def test_nothing_is_served_before_the_model_is_ready():
    async def scenario(client, service):
        return [await client.get("/health"), await client.get("/v1/models"), await ask(client)]

    responses = run(None, scenario)
    assert [response.status_code for response in responses] == [503] * 3
    assert all("being loaded" in error_of(response)["message"] for response in responses)


def test_key(engine):
    async def scenario(client, service):
        keys = [None, "Bearer wrong", "Basic secret", "Bearer sécret".encode(), "Bearer secret"]
        calls = [ask(client, headers={} if key is None else {"Authorization": key}) for key in keys]
        open_paths = [await client.get("/health"), await client.get("/"), await client.get("/metrics")]
        return await asyncio.gather(*calls), open_paths

    calls, open_paths = run(engine, scenario, api_key="secret")
    assert [call.status_code for call in calls] == [401] * 4 + [200]
    assert error_of(calls[0])["code"] == "invalid_api_key" and "secret" not in calls[0].text
    assert [response.status_code for response in open_paths] == [200, 200, 401]


def test_origins(engine):
    async def scenario(client, service):
        headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        return await client.options("/v1/completions", headers=headers), await ask(client, headers=headers)

    for response in run(engine, scenario):
        assert "access-control-allow-origin" not in response.headers
    preflight, answer = run(engine, scenario, allowed_origins=("http://page",))
    assert preflight.status_code == answer.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://page"
    assert answer.headers["access-control-allow-origin"] == "http://page"


@pytest.mark.parametrize("log_prompts", [False, True])
def test_log(engine, caplog, log_prompts):
    async def scenario(client, service):
        await ask(client, {**QUICK, "prompt": "my words"}, headers={"X-Request-Id": "abc-1"})
        await ask(client, headers={"X-Request-Id": "two\twords"})
        return await client.get("/no/such%0Apath")

    with caplog.at_level(logging.INFO, logger="flax_paged"):
        run(engine, scenario, log_prompts=log_prompts)
    assert "abc-1: POST /v1/completions 200 in" in caplog.text
    assert ("my words" in caplog.text) == log_prompts
    assert "two" not in caplog.text and "such" not in caplog.text


def test_a_fault_of_ours_is_logged_and_not_shown(engine, caplog, monkeypatch):
    def fail(schedule):
        raise FloatingPointError("secret of /some/folder/house.py")

    async def scenario(client, service):
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "launch", fail)
            failed = await ask(client)
        return failed, await ask(client)

    failed, fine = run(engine, scenario)
    assert failed.status_code == 500 and "secret" not in failed.text and fine.status_code == 200
    assert "secret of" in caplog.text


def test_a_schema_that_gives_up_ends_its_call(engine, monkeypatch):
    advance = Grammar.advance

    def give_up(grammar, token_id):
        advance(grammar, token_id)
        grammar.error = "too complex"

    async def scenario(client, service):
        with monkeypatch.context() as patch:
            patch.setattr(Grammar, "advance", give_up)
            body = {**QUICK, "max_tokens": 9, "response_format": {"type": "json_object"}}
            return await ask(client, body), await ask(client, {**body, "stream": True}), await ask(client)

    whole, streamed, plain = run(engine, scenario)
    assert whole.status_code == 400 and "too complex" in error_of(whole)["message"]
    assert "too complex" in streamed.text and plain.status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"model_name": ""},
        {"api_key": ""},
        {"max_body_bytes": 0},
        {"max_num_waiting": 0},
        {"queue_timeout": 0},
        {"request_timeout": float("nan")},
        {"shutdown_grace": -1},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerOptions(**{"model_name": "tiny", **options})
