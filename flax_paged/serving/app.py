"""`create_app`: the routes."""

import base64
import hashlib
import importlib.resources
import json
import logging
import time
import uuid
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from flax_paged.serving.chat import chat, encode_chat
from flax_paged.serving.completions import complete
from flax_paged.serving.errors import ApiError, validation_error
from flax_paged.serving.middleware import Gate
from flax_paged.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from flax_paged.serving.responses import json_response
from flax_paged.serving.service import Service

_LOGGER = logging.getLogger(__name__)

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_STATUSES = {
    400: "The request is wrong",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too many requests are waiting",
    500: "The server failed",
    503: "The model is not ready",
    504: "The answer took too long",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in _STATUSES.items()
} | {422: {"description": "Not used; see 400"}}


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application.

    Args:
        service: What answers. Calls are refused with 503 until it is started.
    """
    app = FastAPI(title="flax_paged", docs_url=None, redoc_url=None)  # FastAPI's pages load scripts from elsewhere
    app.state.service = service
    _add_routes(app)
    _add_error_handlers(app)
    app.add_middleware(Gate, service=service)
    if service.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


_Service = Annotated[Service, Depends(_service)]


def _add_routes(app: FastAPI) -> None:
    page = importlib.resources.files("flax_paged.serving").joinpath("chat.html").read_text(encoding="utf-8")
    policy = _content_security_policy(page)
    created = int(time.time())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})

    @app.get("/health", responses=_ERRORS)
    async def health(service: _Service) -> Response:
        service.engine  # noqa: B018 (raises unless it is ready)
        return json_response({"status": "ok"})

    @app.get("/metrics", responses=_ERRORS)
    async def metrics(service: _Service) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def model_card(service: Service, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": created, "owned_by": "flax_paged"}
        parent = {"parent": service.options.model_name} if name in service.options.adapter_names else {}
        return {**card, "max_model_len": service.engine.max_model_len, **parent}

    @app.get("/v1/models", responses=_ERRORS)
    async def models(service: _Service) -> Response:
        names = (service.options.model_name, *service.options.adapter_names)
        return json_response({"object": "list", "data": [model_card(service, name) for name in names]})

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(service: _Service, model: str) -> Response:
        service.check_model(model)
        return json_response(model_card(service, model))

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(service: _Service, body: CompletionRequest, request: Request) -> Response:
        _log_prompt(service, request, body.prompt)
        return await complete(service, body, request, f"cmpl-{uuid.uuid4().hex}")

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(service: _Service, body: ChatRequest, request: Request) -> Response:
        _log_prompt(service, request, [message.for_template() for message in body.messages])
        return await chat(service, body, request, f"chatcmpl-{uuid.uuid4().hex}")

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(service: _Service, body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        tokenizer, max_model_len = service.tokenizer, service.engine.max_model_len
        if body.prompt is not None:
            token_ids = await service.in_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        else:
            options = (body.add_generation_prompt, body.chat_template_kwargs)
            token_ids = await encode_chat(service, body.messages, *options)
        texts = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return json_response(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": texts}
        )

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(service: _Service, body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        vocab_size = service.engine.vocab_size
        if any(token_id >= vocab_size for token_id in body.tokens):
            raise ApiError(400, f"tokens: expected ids below {vocab_size}.", param="tokens")
        text = await service.in_thread(service.tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = {404: "There is no such path.", 400: "The body is not valid JSON."}.get(
            error.status_code, str(error.detail)
        )
        return ApiError(error.status_code, message, headers=error.headers).response()


def _log_prompt(service: Service, request: Request, prompt: Any) -> None:
    if service.options.log_prompts:
        _LOGGER.info("%s: prompt %s", request.scope["state"]["request_id"], json.dumps(prompt))


def _content_security_policy(page: str) -> str:
    """Allow the page its own script and style, and to talk with this server only."""

    def hash_of(tag: str) -> str:
        content = page.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    return (
        f"default-src 'none'; connect-src 'self'; script-src 'sha256-{hash_of('script')}';"
        f" style-src 'sha256-{hash_of('style')}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
