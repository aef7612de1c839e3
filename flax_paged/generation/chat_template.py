"""Render a checkpoint's chat template, in the Jinja environment that Hugging Face templates are written for."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}..{% endgeneration %}`, which marks the assistant's words for training: rendered, no more."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes HTML characters, which belong to no prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    """Return the compiled template; templates come with checkpoints and are untrusted, hence the sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Return a conversation as the text that the model was trained on.

    Args:
        template: Jinja source.
        messages: One mapping a message, with `role` and `content` and whatever else the template reads.
        **variables: Further names the template reads, such as `add_generation_prompt`, `bos_token` or `tools`.

    Returns:
        The prompt.

    Raises:
        TypeError: A message is not a mapping.
        ValueError: The template is not valid, or refuses the conversation.
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(
                f'a chat message must be a mapping such as {{"role": "user", "content": "..."}}, got {message!r}.'
            )
    try:
        return _compiled(template).render(messages=messages, **variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
