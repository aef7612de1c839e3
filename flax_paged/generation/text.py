"""Text and token ids: the checkpoint's tokenizer, its chat template, and text that grows token by token."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from flax_paged.generation.chat_template import render_chat

# The files that make a tokenizer, in Hugging Face's form; all but the first may be missing.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "▁"


class Tokenizer:
    """A checkpoint's tokenizer: text to ids and back, special tokens, chat template.

    Ids are those of Hugging Face's tokenizer for the same files. `clean_up_tokenization_spaces` is not applied: the
    tokenizers of decoder models keep spaces themselves, and transformers 5 ignores it for them too.

    Args:
        files: Contents of the files in `TOKENIZER_FILES`, by name.
        model_config: The model's `config.json`, for its end-of-sequence ids.

    Attributes:
        bos_token_id: Id of the begin-of-sequence token; None if there is none.
        eos_token_ids: Every id that ends an answer: of the tokenizer, `config.json` and `generation_config.json`.
        special_tokens: Text of the named special tokens (`bos_token`, `eos_token`, ...).
        adds_bos: Whether `encode` begins with BOS: as `add_bos_token` says, or else as `tokenizer.json` does.

    Raises:
        ValueError: `tokenizer.json` is missing, not valid, or contradicts `tokenizer_config.json`.
    """

    def __init__(self, files: Mapping[str, str], model_config: Mapping[str, Any] | None = None):
        if "tokenizer.json" not in files:
            raise ValueError("a tokenizer needs the contents of tokenizer.json.")
        self._files = {name: files[name] for name in TOKENIZER_FILES if name in files}
        try:
            self._backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        except Exception as error:  # tokenizers raises a bare Exception
            raise ValueError(f"tokenizer.json is not valid: {error}") from None
        self._backend.no_truncation()  # settings that some files keep from training
        self._backend.no_padding()
        config = self._json("tokenizer_config.json")
        self._add_tokens(config.get("added_tokens_decoder", {}))
        self._set_special_tokens({**self._json("special_tokens_map.json"), **config})
        self._chat_template = files.get("chat_template.jinja", config.get("chat_template"))
        self._set_bos_and_eos(config, model_config or {})
        self._to_bytes, self._strips_space = _byte_decoder(json.loads(self._backend.to_str())["decoder"])
        self._special_ids = {
            index for index, token in self._backend.get_added_tokens_decoder().items() if token.special
        }
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read the tokenizer files of a Hugging Face folder or of ours.

        Raises:
            FileNotFoundError: There is no `tokenizer.json`.
            ValueError: A file is not valid.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json. If it has tokenizer.model, convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        files = {name: _read_text(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
        config = folder / "config.json"
        try:
            return cls(files, json.loads(_read_text(config)) if config.is_file() else None)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer files into an existing folder; generation_config.json names every end-of-sequence id."""
        generation = self._json("generation_config.json")
        files = dict(self._files)
        if set(_as_list(generation.get("eos_token_id"))) != set(self.eos_token_ids):
            # config.json named an id that the other files do not: keep it, whatever becomes of config.json.
            generation["eos_token_id"] = list(self.eos_token_ids)
            files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
        for name, content in files.items():
            (Path(folder) / name).write_text(content, encoding="utf-8", newline="")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's vocabulary may be larger, padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint comes with a chat template."""
        return bool(self._chat_template)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out unless told otherwise."""
        return frozenset(self._special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: The text; special tokens written out in it become their ids.
            add_special_tokens: Add BOS (and EOS) where the tokenizer says so. With BOS, "" gives one id.

        Raises:
            TypeError: `text` is not a string.
            ValueError: `text` is no valid Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}.")
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"text is not valid Unicode: {text[:80]!r} has a lone surrogate.") from None
        if add_special_tokens and self.adds_bos != self._template_adds_bos:
            ids = [self.bos_token_id, *ids] if self.adds_bos else ids[1:]
        return ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, without adding special tokens, and where in the text each begins and ends."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids: what `IncrementalDetokenizer` gives piece by piece.

        Bytes that are no UTF-8 become U+FFFD. Ids without a token, as in a padded vocabulary, have no text.
        """
        if self._to_bytes is None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        pieces = (
            self._token_bytes(index) for index in token_ids if not (skip_special_tokens and index in self._special_ids)
        )
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """Return a conversation as token ids, or as text.

        The ids begin with exactly one BOS if the tokenizer adds BOS at all, whether or not the template writes it.

        Args:
            messages: Mappings with `role` and `content`, oldest first.
            add_generation_prompt: End with the beginning of the assistant's answer.
            tokenize: Return ids and not text.
            chat_template: Jinja source, or the name of one of the checkpoint's templates; None for its default.
            **variables: Further names the template reads, such as `tools`.

        Raises:
            TypeError: A message is not a mapping.
            ValueError: There is no chat template, or it refuses the conversation.
        """
        template = self._template(chat_template, with_tools=bool(variables.get("tools")))
        context = {"tools": None, "documents": None, **self.special_tokens, **variables}
        text = render_chat(template, messages, add_generation_prompt=add_generation_prompt, **context)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token stands for; None where the decoder joins tokens by other rules than bytes."""
        return None if self._to_bytes is None else self._token_bytes(token_id)

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """Return each id's token as the vocabulary spells it; None where there is none."""
        return [self._backend.id_to_token(index) for index in token_ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """Return each token's id; None where the vocabulary does not have it."""
        return [self._backend.token_to_id(token) for token in tokens]

    def _json(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON file of the tokenizer; {} where it is missing."""
        try:
            return json.loads(self._files.get(name, "{}"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not valid JSON: {error}") from None

    def _add_tokens(self, added: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the tokens that tokenizer_config.json has and tokenizer.json lacks, as Hugging Face does."""
        for index, token in sorted(added.items(), key=lambda item: int(item[0])):
            content = token["content"]
            if self._backend.token_to_id(content) is not None:
                continue
            flags = {
                key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token
            }
            self._backend.add_tokens([tokenizers.AddedToken(content, **flags)])
            if self._backend.token_to_id(content) != int(index):
                raise ValueError(
                    f"tokenizer_config.json gives {content!r} the id {index}, but tokenizer.json leaves "
                    f"the id {self._backend.token_to_id(content)} to it: the two files do not belong together."
                )

    def _set_special_tokens(self, named: Mapping[str, Any]) -> None:
        """Collect the named special tokens, written as strings or as mappings with `content`."""
        texts = {name: named[name] for name in _NAMED_TOKENS if named.get(name)}
        self.special_tokens = {name: text if isinstance(text, str) else text["content"] for name, text in texts.items()}

    def _set_bos_and_eos(self, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> None:
        """Find BOS, every EOS, and whether text begins with BOS."""
        self.bos_token_id = self._id_of("bos_token")
        eos = [self._id_of("eos_token")]
        for source in (model_config, self._json("generation_config.json")):
            eos += _as_list(source.get("eos_token_id"))
        self.eos_token_ids = tuple(dict.fromkeys(index for index in eos if index is not None))
        empty = self._backend.encode("", add_special_tokens=True).ids
        self._template_adds_bos = self.bos_token_id is not None and empty[:1] == [self.bos_token_id]
        flag = config.get("add_bos_token")
        self.adds_bos = self._template_adds_bos if flag is None or self.bos_token_id is None else bool(flag)

    def _id_of(self, name: str) -> int | None:
        """Return the id of a named special token."""
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _template(self, chosen: str | None, with_tools: bool) -> str:
        """Return the chat template to use: one string, or one of several by name."""
        templates = self._chat_template
        if isinstance(templates, list):  # as files have it: [{"name": ..., "template": ...}]
            templates = {entry["name"]: entry["template"] for entry in templates}
        if isinstance(templates, dict):
            name = chosen or ("tool_use" if with_tools and "tool_use" in templates else "default")
            if name in templates:
                return templates[name]
            if chosen is None:
                raise ValueError(f"no default chat template; give chat_template= as one of {sorted(templates)}.")
        if chosen or templates:
            return chosen or templates
        raise ValueError("this checkpoint has no chat template; give chat_template=, or a plain prompt.")

    def _token_bytes(self, index: int) -> bytes:
        """Return the bytes a token stands for."""
        if index not in self._bytes_of:
            token = self._backend.id_to_token(index)
            self._bytes_of[index] = b"" if token is None else self._to_bytes(token)
        return self._bytes_of[index]


class IncrementalDetokenizer:
    """Text that grows token by token: the pieces joined are `tokenizer.decode` of all ids.

    A piece never ends inside a character: its bytes are held until the character is complete. What `finish` returns for
    a character that never was completed is U+FFFD, as in `decode`. A U+FFFD that is in the text itself passes at once.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Leave special tokens out.
        continues_text: The ids continue a text, so the space before the first word, which SentencePiece tokenizers drop
            at the beginning of a text, is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._strip_next = tokenizer._strips_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window: list[int] = []  # for decoders that are not bytes: ids around the edge of the text shown

    def add(self, token_id: int) -> str:
        """Return the new text that one more token makes certain; often "", when it ends inside a character."""
        if token_id in self._skipped:
            return ""
        if self._tokenizer._to_bytes is None:
            return self._add_to_window(token_id)
        return self._strip(self._utf8.decode(self._tokenizer._token_bytes(token_id)))

    def finish(self) -> str:
        """Return the text still held; afterwards the object is spent."""
        if self._tokenizer._to_bytes is None:
            return self._shown_after(self._window)
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        """Drop the space that begins a SentencePiece text."""
        if not text or not self._strip_next:
            return text
        self._strip_next = False
        return text[1:] if text.startswith(" ") else text

    def _add_to_window(self, token_id: int) -> str:
        """Add a token, where the decoder joins tokens by rules of its own: decode the last few with and without it."""
        self._window.append(token_id)
        text = self._shown_after(self._window)
        if not text or text.endswith("\ufffd"):
            return ""
        self._num_shown, self._window = 1, self._window[-1:]
        return text

    _num_shown = 0  # how many ids at the start of the window are in the text shown

    def _shown_after(self, window: Sequence[int]) -> str:
        """Return the text that the ids of the window add to those already shown."""
        decode = self._tokenizer.decode
        return decode(window, False)[len(decode(window[: self._num_shown], False)) :]


def _byte_decoder(decoder: Mapping[str, Any] | None):
    """Return how a token becomes bytes, and whether a text's first space is dropped.

    Byte-level BPE and SentencePiece BPE join tokens as bytes, so text can be decoded exactly, one token at a time. For
    a decoder of another kind the function is None.
    """
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3:]
        is_space = replace["pattern"] == {"String": _SENTENCEPIECE_SPACE} and replace["content"] == " "
        if is_space and all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in strip):
            return _sentencepiece_bytes, bool(strip)
    return None, False


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: the printable character that stands for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level BPE token; an added token spelt as plain text is its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: `▁` is a space, `<0x0A>` a byte."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode("utf-8")


def _as_list(ids: int | Sequence[int] | None) -> list[int]:
    """Return end-of-sequence ids as a list, whether a file has none, one or several."""
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _read_text(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()
