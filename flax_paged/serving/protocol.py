"""What clients send: OpenAI's fields, and vLLM's beyond them. Unknown fields are refused, not dropped."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Long lists fail at the first wrong item: a million of them would make a million errors.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]

_MAX_STOPS = 16


def _check_prompt(value: Any) -> Any:
    """Say what is wrong with a prompt in one sentence, where pydantic would say it for each form of a prompt."""
    forms = "expected text, a list of token ids, or a list of either"
    if not isinstance(value, str | list):
        raise ValueError(forms)
    if isinstance(value, list) and not value:
        raise ValueError(f"it is empty; {forms}")
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if len(kinds) > 1 or not kinds <= {str, int, list}:
            raise ValueError(forms)
        if kinds == {list} and any(type(token) is not int for item in value for token in item):
            raise ValueError(forms)
        tokens = value if kinds == {int} else (t for item in value if kinds == {list} for t in item)
        if any(not 0 <= token < 2**31 for token in tokens):
            raise ValueError("a token id is out of range")
    return value


def _check_stop(value: str | list[str] | None) -> str | list[str] | None:
    if not (all(value) if isinstance(value, list) else value != ""):
        raise ValueError("expected texts that are not empty")
    return value


def _at_most(limit: int):
    """Refuse a large mapping before each of its entries is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"expected at most {limit} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_check_prompt)]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=_MAX_STOPS, fail_fast=True)] | None, AfterValidator(_check_stop)
]
LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], _at_most(1024)]
# Accepted and without effect: they tell the provider about the caller, not the model what to say.
Ignored = Annotated[Any, Field(description="Accepted, without effect.")]
# Fields that would change the answer and are not served: only their neutral value is accepted.
Unsupported = Annotated[Literal[False] | Annotated[list, Field(max_length=0)] | None, Field(description="Not served.")]


class _Body(BaseModel):
    """A JSON object with known fields, of the types they say: no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        if isinstance(values, dict) and (unknown := [name for name in values if name not in cls.model_fields]):
            raise ValueError(f"Unrecognized request argument supplied: {', '.join(map(str, unknown[:5]))}")
        return values


class StreamOptions(_Body):
    """What a stream brings beside text."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


class JsonSchema(_Body):
    """A named JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        return values  # the alias hides the field's name; `extra` refuses the rest


class ResponseFormat(_Body):
    """The form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self):
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("type 'json_schema' needs a json_schema with a schema")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer must fit, or None for any text."""
        match self.type:
            case "json_schema":
                return self.json_schema.schema_
            case "json_object":
                return {"type": "object"}
        return None


class SamplingFields(_Body):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    user: Ignored = None
    # vLLM's
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e6)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _check_stream_options(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    best_of: int | None = Field(default=None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    suffix: Unsupported = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self):
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise ValueError(f"best_of={self.best_of} must be at least n={self.n}")
            if self.stream:
                raise ValueError("best_of chooses among whole answers, which a stream cannot; leave one of them out")
        return self


class TextPart(_Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message of a conversation; an answer of the server can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # Templates know no developers, OpenAI's newer name for the system.
        message = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
TemplateVariables = Annotated[dict[str, str | bool | int | float | None], _at_most(32)]


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    parallel_tool_calls: Ignored = None
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Unsupported = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    web_search_options: Unsupported = None
    # vLLM's
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
