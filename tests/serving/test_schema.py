"""schemathesis against the server's own OpenAPI schema. FLAX_PAGED_SCHEMA_EXAMPLES=300 makes more examples."""

import os

import httpx
import hypothesis
import pytest
import schemathesis

NUM_EXAMPLES = int(os.environ.get("FLAX_PAGED_SCHEMA_EXAMPLES", "15"))
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/{model}", "/v1/models"]


@pytest.mark.parametrize("path", [*PATHS, "/health", "/metrics"])
def test_no_path_fails(server, path):
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    (operation,) = schema[path].values()

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def check(case):
        response = case.call(base_url=server.url, timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
