"""`ApiError` and the bodies of refusals, in OpenAI's form."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

# Only so much of what a client sent comes back in a message.
_MAX_MESSAGE_CHARS = 1000

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal that a client sees.

    Args:
        status: The HTTP status.
        message: What is wrong and what helps; holds no paths and no code.
        param: The request's field that is at fault.
        code: OpenAI's name of the error, such as "context_length_exceeded".
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + " ..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> str:
        """Return the error as JSON: OpenAI's `{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})  # ASCII only, so that a lone surrogate of the client's does no harm

    def response(self) -> Response:
        """Return the error as a response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def internal_error() -> ApiError:
    """Return the error of a fault of ours; what it was is in the log, under the request's id."""
    return ApiError(500, "The server failed on this request; its log has the cause under the request's id.")


def validation_error(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """Return the 400 of a body that does not fit the protocol.

    Args:
        errors: What pydantic found.
    """
    by_field: dict[str, list[str]] = {}
    for error in errors:
        by_field.setdefault(_field_name(error["loc"]), []).append(_in_words(error))
    field, messages = next(iter(by_field.items()))
    text = " or ".join(dict.fromkeys(messages))
    return ApiError(400, f"{field}: {text}" if field else text, param=field or None)


def _field_name(loc: Sequence[str | int]) -> str:
    """Return the path of a field in the body, such as `messages[0].role`, without pydantic's branches of unions."""
    name = ""
    for part in loc[1:] if loc[:1] == ("body",) else loc:
        if isinstance(part, int):
            name += f"[{part}]" if name else ""
        elif part.isidentifier() and part not in ("str", "int", "list", "float", "bool"):
            name += f".{part}" if name else part
    return name


def _in_words(error: Mapping[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"The body is not valid JSON: {error.get('ctx', {}).get('error', '')}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return error["msg"]
