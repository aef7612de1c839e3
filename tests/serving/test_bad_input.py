"""What clients must not send: the status and the message of each, from a server that stays healthy."""

import json
import socket

import httpx
import pytest

BIG = 10 * 2**20
# Body -> status, code, and what the message says.
BODIES = {
    "no JSON": (b"{", 400, None, "not valid JSON"),
    "empty": (b"", 400, None, "Field required"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, None, "not valid JSON"),
    "not an object": (b"[1]", 400, None, "dictionary or object"),
    "deep": (b"[" * 200_000, 400, None, "not valid JSON"),
    "huge number": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None, "not valid JSON"),
    "no prompt": ({}, 400, None, "prompt: Field required"),
    "null prompt": ({"prompt": None}, 400, None, "prompt: expected text, a list of token ids"),
    "wrong type": ({"prompt": "a", "max_tokens": "5"}, 400, None, "max_tokens: Input should be a valid integer"),
    "fraction": ({"prompt": "a", "max_tokens": 1.5}, 400, None, "max_tokens: Input should be a valid integer"),
    "bool": ({"prompt": "a", "n": True}, 400, None, "n: Input should be a valid integer"),
    "negative": ({"prompt": "a", "max_tokens": -1}, 400, None, "max_tokens: Input should be greater"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, None, "temperature: Input should be"),
    "infinity": (b'{"prompt": "a", "temperature": 1e999}', 400, None, "temperature: Input should be"),
    "hot": ({"prompt": "a", "temperature": 3}, 400, None, "temperature: Input should be less"),
    "unknown": ({"prompt": "a", "temprature": 1}, 400, None, "Unrecognized request argument supplied: temprature"),
    "unknown in a part": (
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        400,
        None,
        "stream_options: Unrecognized request argument supplied: x",
    ),
    "empty prompt": ({"prompt": ""}, 400, None, "The prompt has no tokens"),
    "empty prompts": ({"prompt": []}, 400, None, "prompt: it is empty"),
    "mixed prompts": ({"prompt": ["a", 1]}, 400, None, "prompt: expected text"),
    "surrogate": (b'{"prompt": "\\ud800"}', 400, None, "surrogate"),
    "token id": ({"prompt": [512]}, 400, None, "token id 512"),
    "token id below 0": ({"prompt": [-1]}, 400, None, "prompt: a token id is out of range"),
    "long prompt": ({"prompt": "word " * 2000}, 400, "context_length_exceeded", "maximum context length is 256"),
    "long answer": ({"prompt": "a", "max_tokens": 256}, 400, "context_length_exceeded", "reduce the length"),
    "many answers": ({"prompt": ["a"] * 10, "n": 13}, 400, None, "10 prompts times 13 answers are more than 128"),
    "greedy n": ({"prompt": "a", "n": 2, "temperature": 0}, 400, None, "greedy answers are all equal"),
    "best_of": ({"prompt": "a", "n": 3, "best_of": 2}, 400, None, "best_of=2 must be at least n=3"),
    "streamed best_of": ({"prompt": "a", "best_of": 2, "stream": True}, 400, None, "best_of chooses"),
    "stream_options": ({"prompt": "a", "stream_options": {}}, 400, None, "needs stream=true"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, 400, None, "max_logprobs=20"),
    "streamed logprobs": ({"prompt": "a", "logprobs": 21, "stream": True}, 400, None, "max_logprobs=20"),
    "logit_bias": ({"prompt": "a", "logit_bias": {"x": 1}}, 400, None, "logit_bias: expected token ids"),
    "logit_bias range": ({"prompt": "a", "logit_bias": {"1": 101}}, 400, None, "logit_bias: Input should be less"),
    "empty stop": ({"prompt": "a", "stop": [""]}, 400, None, "stop: expected texts that are not empty"),
    "many stops": ({"prompt": "a", "stop": ["x"] * 17}, 400, None, "at most 16"),
    "min_tokens": ({"prompt": "a", "min_tokens": 20, "max_tokens": 5}, 400, None, "at most max_tokens"),
    "model": ({"prompt": "a", "model": "gpt"}, 404, "model_not_found", "The model `gpt` does not exist"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, None, "suffix"),
    "10 MB": ({"prompt": "x" * BIG}, 413, None, "larger than 4194304 bytes"),
    "a million wrong items": ({"prompt": [1.5] * 500_000}, 400, None, "prompt: expected text"),
}


@pytest.mark.parametrize("name", BODIES)
def test_completions(server, name):
    body, status, code, message = BODIES[name]
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine-1"}
    response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
    check(response, status, message)
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role: Input should be"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0]: Unrecognized request argument"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ],
)
def test_chat(server, body, message):
    check(httpx.post(f"{server.url}/v1/chat/completions", json=body), 400, message)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("GET", "/nowhere", {}, 404, "no such path"),
        ("GET", "/v1/completions", {}, 405, "Method Not Allowed"),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", {}, 404, "no such path"),
        (
            "POST",
            "/v1/completions",
            {"content": "{}", "headers": {"Content-Type": "text/plain"}},
            415,
            "application/json",
        ),
        ("POST", "/tokenize", {"json": {}}, 400, "either prompt or messages"),
        ("POST", "/detokenize", {"json": {"tokens": [512]}}, 400, "below 512"),
        ("POST", "/detokenize", {"json": {"tokens": "x"}}, 400, "tokens: Input should be a valid list"),
    ],
)
def test_paths(server, method, path, options, status, message):
    check(httpx.request(method, f"{server.url}{path}", **options), status, message)


def test_a_body_larger_than_announced_or_without_end(server):
    """A body in chunks has no length to look at beforehand."""
    chunks = (b"x" * 2**20 for _ in range(10))
    response = httpx.post(f"{server.url}/v1/completions", content=chunks, headers={"Content-Type": "application/json"})
    check(response, 413, "larger than")


def test_what_is_not_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    for data in (b"\x16\x03\x01garbage\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            assert connection.recv(4096).startswith(b"HTTP/1.1 4")


def check(response: httpx.Response, status: int, message: str) -> None:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert message in error["message"] and len(error["message"]) < 1100
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    for secret in ("Traceback", ".py", "site-packages", "/work", "/tmp"):
        assert secret not in response.text
    assert response.headers["content-type"] == "application/json"


def test_the_server_is_healthy_afterwards(server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.wait_until_idle()["flax_paged_live_pages"] == 0
    assert "Traceback" not in server.log_path.read_text()
    assert "Redistribution" not in server.log_path.read_text()  # the other tests' prompt
