"""64 clients at once, some of which hang up or send garbage. FLAX_PAGED_LOAD_SECONDS=120 makes the run a long one."""

import asyncio
import contextlib
import json
import os
import random
import time
from pathlib import Path

import httpx
import pytest
from test_bad_input import BODIES

from flax_paged import SamplingParams

NUM_CLIENTS = 64
SECONDS = float(os.environ.get("FLAX_PAGED_LOAD_SECONDS", "3"))
PROMPTS = [f"Clause {i} of the licence" for i in range(16)]
MAX_TOKENS = 24
GARBAGE = [name for name in BODIES if "million" not in name]
HEADERS = {"Content-Type": "application/json"}


class Load:
    """What the clients do, and what they have seen."""

    def __init__(self, url: str, expected: dict[str, str]):
        self.url = url
        self.expected = expected
        self.counts = dict.fromkeys(("whole", "streamed", "hung up", "garbage", "slow"), 0)

    async def run(self, num_seconds: float) -> None:
        end = time.monotonic() + num_seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._one_client(client, random.Random(i), end) for i in range(NUM_CLIENTS)))

    async def _one_client(self, client: httpx.AsyncClient, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            (kind,) = rng.choices(list(self.counts), weights=[28, 28, 34, 8, 2])
            await {
                "whole": self._whole,
                "streamed": self._streamed,
                "hung up": self._hung_up,
                "garbage": self._garbage,
                "slow": self._slow,
            }[kind](client, rng)
            self.counts[kind] += 1

    def _body(self, rng: random.Random, **options) -> dict:
        return {"prompt": rng.choice(PROMPTS), "max_tokens": MAX_TOKENS, "temperature": 0, **options}

    async def _whole(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = self._body(rng)
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == self.expected[body["prompt"]]

    async def _streamed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = self._body(rng, stream=True)
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert line == "" or line == "data: [DONE]"
        assert text == self.expected[body["prompt"]]

    async def _hung_up(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = self._body(rng, stream=rng.random() < 0.7, n=2, temperature=1, max_tokens=200, ignore_eos=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.01, 0.5)):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        pass

    async def _garbage(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body, status, _, message = BODIES[rng.choice(GARBAGE)]
        content = body if isinstance(body, bytes) else json.dumps(body)
        response = await client.post("/v1/completions", content=content, headers=HEADERS)
        assert response.status_code == status and message in response.json()["error"]["message"], response.text

    async def _slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """Send a body a byte at a time, and give up."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 1000\r\n\r\n")
        for _ in range(10):
            writer.write(b" ")
            await asyncio.sleep(0.02)
        writer.close()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_many_clients(server, engine):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    expected = {o.prompt: o.outputs[0].text for o in engine.generate(PROMPTS, params)}
    before = server.wait_until_idle()
    load = Load(server.url, expected)
    asyncio.run(load.run(SECONDS / 3))  # buffers and pools grow to their size
    server.wait_until_idle()
    memory = resident_bytes(server.process.pid)
    asyncio.run(load.run(SECONDS * 2 / 3))
    after = server.wait_until_idle()
    growth = resident_bytes(server.process.pid) - memory
    print(f"{load.counts} in {SECONDS:g} s; memory {memory / 2**20:.0f} MiB, then {growth / 2**20:+.1f} MiB")
    assert sum(load.counts.values()) >= NUM_CLIENTS
    names = ("flax_paged_free_pages", "flax_paged_cached_pages")
    assert sum(after[name] for name in names) == sum(before[name] for name in names) == 64
    assert after["flax_paged_running_sequences"] == after["flax_paged_waiting_sequences"] == 0
    assert growth < 32 * 2**20
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "Traceback" not in server.log_path.read_text()
