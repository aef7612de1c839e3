"""Training data: JSONL of conversations, prompts with completions, or text; and text files."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flax_paged.generation.text import Tokenizer
from flax_paged.training.batches import Example

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = "expected 'messages', 'prompt' and 'completion', or 'text'"
_MAX_NAMED = 20  # problems that a message names; the rest are counted


class BadExample(ValueError):
    """An example that cannot be learnt from; `kind` groups what is wrong, for counting."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


@dataclasses.dataclass
class DataReport:
    """What was found in a file.

    Fields:
        path: The file.
        num_examples: Examples read.
        num_tokens: Their tokens.
        num_weighted_tokens: Tokens that are learnt.
        problems: "file, line N: what is wrong" of every line that is not used.
        counts: Number of problems by kind.
    """

    path: Path
    num_examples: int = 0
    num_tokens: int = 0
    num_weighted_tokens: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    counts: Counter = dataclasses.field(default_factory=Counter)

    def add_problem(self, line: int, kind: str, detail: str) -> None:
        """Note that a line is not used."""
        self.problems.append(f"{self.path}, line {line}: {detail}")
        self.counts[kind] += 1

    def summary(self) -> str:
        """Return the report as lines of text."""
        lines = [
            f"{self.path}: {self.num_examples} examples, {self.num_tokens} tokens, {self.num_weighted_tokens} learnt;"
            f" {len(self.problems)} lines not used"
            + (f" ({', '.join(f'{kind}: {n}' for kind, n in sorted(self.counts.items()))})." if self.counts else ".")
        ]
        lines += [f"  {problem}" for problem in self.problems[:_MAX_NAMED]]
        if len(self.problems) > _MAX_NAMED:
            lines.append(f"  ... and {len(self.problems) - _MAX_NAMED} more")
        return "\n".join(lines)


def read_examples(
    path: str | Path, tokenizer: Tokenizer, *, max_length: int, skip_bad: bool = False
) -> tuple[list[Example], DataReport]:
    """Read and tokenize a file.

    A `.jsonl` file has one JSON object a line, of one of these forms:

        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
        {"prompt": "...", "completion": "..."}
        {"text": "..."}

    Conversations are rendered with the checkpoint's chat template, and only what the assistant says is learnt, its end
    included; of a prompt with a completion, the completion. Text is learnt whole, in pieces if it is long. Any other
    file is one text.

    Args:
        path: The file, UTF-8.
        tokenizer: The checkpoint's tokenizer.
        max_length: An example may take this many places, that is, have one token more.
        skip_bad: Leave out the lines that cannot be used instead of raising; the report names them.

    Returns:
        The examples in order, and a report. Empty lines are in the report and are never an error.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no example, or, unless `skip_bad`, a line that cannot be used; the message names the
            lines.
    """
    path = Path(path)
    report = DataReport(path)
    examples: list[Example] = []
    is_jsonl = path.suffix in (".jsonl", ".ndjson", ".json")
    for line, content in _lines(path.read_bytes(), is_jsonl, report):
        try:
            new = list(_examples_of(content, tokenizer, max_length, is_jsonl))
        except BadExample as error:
            report.add_problem(line, error.kind, str(error))
            continue
        examples += new
    report.num_examples = len(examples)
    report.num_tokens = sum(len(example.token_ids) for example in examples)
    report.num_weighted_tokens = sum(int(np.count_nonzero(example.weights[1:])) for example in examples)
    if set(report.counts) - {"empty line"} and not skip_bad:
        raise ValueError(
            f"some of the data cannot be used. Correct it, or leave it out (skip_bad=True, --skip-bad-data).\n"
            f"{report.summary()}"
        )
    if not examples:
        raise ValueError(f"there is nothing to learn.\n{report.summary()}")
    return examples, report


def chat_example(messages: Any, tokenizer: Tokenizer) -> Example:
    """Tokenize a conversation, of which what the assistant says is learnt, with the token that ends it.

    What the assistant says is what the template puts after the prompt that the engine would be given at that point.

    Args:
        messages: Mappings with `role` and `content`, oldest first.
        tokenizer: A tokenizer with a chat template.

    Raises:
        BadExample: The conversation is malformed, has no assistant's turn, or does not fit the template.
        ValueError: The tokenizer has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise ValueError(
            "the data has conversations, but the checkpoint has no chat template; use 'prompt' and 'completion'."
        )
    _check_messages(messages)
    text, spans = _assistant_spans(messages, tokenizer)
    token_ids, token_spans = tokenizer.encode_with_spans(text)
    weights = [float(any(a < end and b > begin for begin, end in spans)) for a, b in token_spans]
    if tokenizer.adds_bos and token_ids[:1] != [tokenizer.bos_token_id]:
        token_ids, weights = [tokenizer.bos_token_id, *token_ids], [0.0, *weights]
    return _example(token_ids, weights)


def _lines(data: bytes, is_jsonl: bool, report: DataReport) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line of a JSONL file that is text, or (1, all) of a text file."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not is_jsonl:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            report.add_problem(line, "not UTF-8", f"not valid UTF-8: byte {data[error.start]:#04x}")
        else:
            yield 1, text
        return
    lines = data.split(b"\n")
    if not lines[-1].strip():
        lines.pop()  # what follows the last newline is no line
    for number, line in enumerate(lines, 1):
        if not line.strip():
            report.add_problem(number, "empty line", "empty")
            continue
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            report.add_problem(number, "not UTF-8", f"not valid UTF-8: byte {line[error.start]:#04x}")


def _examples_of(content: str, tokenizer: Tokenizer, max_length: int, is_jsonl: bool) -> Iterator[Example]:
    if not is_jsonl:
        yield from _text_examples(content, tokenizer, max_length)
        return
    try:
        values = json.loads(content)
    except json.JSONDecodeError as error:
        raise BadExample("invalid JSON", f"invalid JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise BadExample("unknown form", f"{_FORMS}, got a JSON {type(values).__name__}")
    if "messages" in values:
        example = chat_example(values["messages"], tokenizer)
    elif "prompt" in values and "completion" in values:
        example = _completion_example(values["prompt"], values["completion"], tokenizer)
    elif "text" in values:
        yield from _text_examples(_text(values["text"], "text"), tokenizer, max_length)
        return
    else:
        raise BadExample("unknown form", f"{_FORMS}, got {sorted(values)}")
    if len(example.token_ids) > max_length + 1:
        raise BadExample("too long", f"{len(example.token_ids)} tokens, more than max_length + 1 = {max_length + 1}")
    yield example


def _completion_example(prompt: Any, completion: Any, tokenizer: Tokenizer) -> Example:
    prompt_ids = tokenizer.encode(_text(prompt, "prompt"))
    completion_ids = tokenizer.encode(_text(completion, "completion"), add_special_tokens=False)
    completion_ids += tokenizer.eos_token_ids[:1]
    if not prompt_ids:
        raise BadExample("empty prompt", "'prompt' has no tokens; use 'text' for text without a prompt")
    return _example(prompt_ids + completion_ids, [0.0] * len(prompt_ids) + [1.0] * len(completion_ids))


def _text_examples(text: str, tokenizer: Tokenizer, max_length: int) -> Iterator[Example]:
    """Cut a text into pieces that overlap by one token, so that every token but the first is predicted once."""
    token_ids = tokenizer.encode(text) + list(tokenizer.eos_token_ids[:1])
    if not text.strip() or len(token_ids) < 2:
        raise BadExample("empty text", "the text is empty")
    for start in range(0, len(token_ids) - 1, max_length):
        piece = token_ids[start : start + max_length + 1]
        yield _example(piece, [1.0] * len(piece))


def _example(token_ids: list[int], weights: list[float]) -> Example:
    if not any(weights[1:]):
        raise BadExample("nothing to learn", "no token of it is to be learnt")
    return Example(np.asarray(token_ids, np.int32), np.asarray(weights, np.float32))


def _assistant_spans(messages: list[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """Return the conversation as text, and where in it the assistant speaks."""

    def render(count: int, **options) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, **options)

    try:
        text = render(len(messages), add_generation_prompt=False)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = render(i, add_generation_prompt=True)
                after = render(i + 1, add_generation_prompt=False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise BadExample(
                        "template rewrites history",
                        f"the chat template renders turn {i + 1} differently once more follows, so that what the"
                        " assistant says there cannot be told apart; give each of its answers an example of its own",
                    )
                # A line break that follows the end of the turn belongs to the template; the engine never sees it.
                spans.append((len(before), len(after.rstrip())))
    except BadExample:
        raise
    except ValueError as error:
        raise BadExample("template refuses", str(error)) from None
    return text, spans


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadExample("malformed messages", f"expected 'messages' to be a list of turns, got {messages!r:.80}")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise BadExample(
                "malformed messages", f"expected turn {i} to have 'role' and 'content', got {message!r:.80}"
            )
        if message.get("role") not in ROLES:
            raise BadExample("unknown role", f"turn {i} has role {message.get('role')!r}; expected one of {ROLES}")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise BadExample("no assistant turn", "the assistant says nothing, so there is nothing to learn")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadExample("unknown form", f"expected {name!r} to be text, got {value!r:.60}")
    return value
