"""The process: it ends properly while it is busy."""

import asyncio
import json
import signal
import socket
import time

import httpx


async def _stream(url: str) -> tuple[bool, str]:
    """Stream until the server is gone. Returns whether the last stream ended properly, and its last event."""
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            try:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code == 503:
                        return True, "refused"
                    lines = []
                    async for line in response.aiter_lines():
                        if line:
                            lines.append(line)
                        if len(lines) == 5:
                            _stream.begun.set()
            except httpx.TransportError:  # gone before the next call; amid a stream, its last line says so
                break
    if not lines:  # it came too late for its first call
        return True, "refused"
    return lines[-1] == "data: [DONE]", lines[-2]


def test_sigterm_while_busy(start_server):
    server = start_server("--shutdown-grace", "1")

    async def main():
        _stream.begun = asyncio.Event()
        clients = [asyncio.create_task(_stream(server.url)) for _ in range(16)]
        await _stream.begun.wait()
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*clients)

    for ended, last in asyncio.run(main()):
        assert ended, last
        if last != "refused":
            event = json.loads(last.removeprefix("data: "))
            assert "error" in event or event["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(timeout=60) == 0
    log = server.log_path.read_text()
    assert "SIGTERM: refusing new calls; running ones have 1 s to finish" in log and "Traceback" not in log


def test_sigterm_while_loading(launch_server):
    process, log_path = launch_server("--compilation-cache", "")  # so that there is something to compile
    while "Compiling" not in log_path.read_text():
        assert process.poll() is None, log_path.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0, log_path.read_text()


def test_slow_headers_and_bodies(start_server):
    server = start_server("--body-timeout", "0.5", "--log-level", "debug")
    host, port = server.url.removeprefix("http://").split(":")
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(start)  # and no end of the headers
        assert connection.recv(100) == b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(start + b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{")
        answer = b""
        while data := connection.recv(4096):
            answer += data
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 s" in answer
    with httpx.Client(base_url=server.url, timeout=60) as client:  # a call that takes longer is not cut off
        body = {"prompt": "Hello", "max_tokens": 200, "n": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 0
