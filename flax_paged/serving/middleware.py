"""What every call passes: its id, the key, the limits of its body, the log, and errors without traces."""

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flax_paged.serving.errors import ApiError, internal_error
from flax_paged.serving.responses import ClientDisconnectedError
from flax_paged.serving.service import Service

_LOGGER = logging.getLogger(__name__)

# What needs no key: the page, which asks for it, and what load balancers look at.
_OPEN_PATHS = ("/", "/health")
# What is asked every few seconds, which nobody wants in the log.
_POLLED_PATHS = ("/health", "/metrics")
_CLIENTS_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Of a body that is too large, so much is read and dropped: a client that is still sending would not see the answer.
_MAX_DROPPED_BYTES = 64 * 2**20
_CLIENT_CLOSED_REQUEST = 499  # as nginx logs it


class Gate:
    """Lets calls in, and answers for what goes wrong inside.

    Sets `scope["state"]["request_id"]`: the client's `X-Request-Id` if it is a plain one, else a new one. The
    response carries it too.

    Args:
        app: What is inside.
        service: Its options say what is allowed; its metrics count the calls.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._options = service.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _CLIENTS_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_with_id)
        except ClientDisconnectedError:
            status = _CLIENT_CLOSED_REQUEST
        except Exception as error:
            refusal = error if isinstance(error, ApiError) else internal_error()
            if not isinstance(error, ApiError):
                _LOGGER.exception("%s: the server failed", request_id)
            if status:  # too late to say so
                raise
            await refusal.response()(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.metrics.count_call(route, status)
            # The path is the client's to choose: only a known one is written as it is.
            seconds = time.monotonic() - start
            level = logging.DEBUG if route in _POLLED_PATHS else logging.INFO
            _LOGGER.log(level, "%s: %s %s %d in %.3f s", request_id, _word(scope["method"]), route, status, seconds)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        self._check_key(scope, headers)
        body = b""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            body = await self._read_body(headers, receive)
            self._check_content_type(headers)
        await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        key = self._options.api_key
        if key is None or scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time of a refusal tells nothing about the key.
        is_right = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "Incorrect API key provided. Send the server's key as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_content_type(self, headers: Headers) -> None:
        """Refuse what a web page could send to this server without being asked first whether it may."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Unsupported Media Type: only 'application/json' is allowed.")

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._options.max_body_bytes
        body = bytearray()
        num_bytes = 0
        try:
            async with asyncio.timeout(self._options.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnectedError
                    data = message.get("body", b"")
                    num_bytes += len(data)
                    if num_bytes <= limit:
                        body += data
                    elif num_bytes > _MAX_DROPPED_BYTES:
                        break
                    more = message.get("more_body", False)
        except TimeoutError:
            seconds = self._options.body_timeout
            raise ApiError(
                408, f"The body did not arrive within {seconds:g} s.", headers={"Connection": "close"}
            ) from None
        if num_bytes > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes; send a shorter prompt.")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that has been read, then what comes after it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _word(text: str) -> str:
    """Return a client's word if it can be written to a log as it is."""
    return text if text.isalnum() and len(text) < 20 else "?"
