import json
import random
import time

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from flax_paged.generation.text import IncrementalDetokenizer, Tokenizer

# The byte-level alphabet and no merges: one token a byte, so that every character of more than one byte is split.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_tokenizer(bos=None):
    vocab = {token: index for index, token in enumerate([*SPECIAL, *_ALPHABET])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    return backend


def sentencepiece_tokenizer():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁ab", "ab", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def make(backend, config=None, model_config=None, **files):
    contents = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config or {})}
    return Tokenizer(contents | {name.replace("__", "."): text for name, text in files.items()}, model_config)


def stream(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.add(index) for index in ids), detokenizer.finish()]


TEXTS = [
    "plain text, with  spaces ",
    " leading",
    "emoji 😀 👩‍👩‍👧 한국어 ďábel \u200b",
    "a real \ufffd in the text \ufffd",
    "\ufffd",
    "new\nline\r\n\ttab",
]


# Characters split over tokens


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_split_a_character(text):
    tokenizer = make(byte_tokenizer())
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()), "one token a byte"
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd"), "no replacement character of our own"
    assert pieces[-1] == "", "nothing is left to the end"
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


def test_a_complete_character_is_shown_at_once():
    tokenizer = make(byte_tokenizer())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add(index) for index in tokenizer.encode("a😀\ufffdb")] == [
        "a", "", "", "", "😀", "", "", "\ufffd", "b"
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_output_that_ends_inside_a_character(cut):
    tokenizer = make(byte_tokenizer())
    ids = tokenizer.encode("ok 😀")[: 3 + cut]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "ok \ufffd"
    assert pieces[-1] == "\ufffd", "the unfinished character is one U+FFFD, from finish()"


def test_any_bytes_decode_as_the_tokenizers_package_does():
    backend = byte_tokenizer()
    tokenizer, rng = make(backend), random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(SPECIAL) + 256) for _ in range(rng.randrange(40))]
        assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == backend.decode(ids)
        kept = "".join(stream(tokenizer, ids, skip_special_tokens=False))
        assert (
            tokenizer.decode(ids, skip_special_tokens=False) == kept == backend.decode(ids, skip_special_tokens=False)
        )


def test_special_tokens_are_skipped_or_shown():
    tokenizer = make(byte_tokenizer())
    ids = tokenizer.encode("<s>a<|end|>")
    assert "".join(stream(tokenizer, ids)) == "a"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "<s>a<|end|>"


def test_a_special_token_inside_a_character_breaks_nothing():
    tokenizer = make(byte_tokenizer())
    ids = tokenizer.encode("😀")
    ids.insert(2, 2)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "😀"


def test_ids_without_a_token_have_no_text():
    tokenizer = make(byte_tokenizer())
    ids = [*tokenizer.encode("a"), 5000, *tokenizer.encode("b")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "ab"


# SentencePiece


@pytest.mark.parametrize("text", ["ab ab", "ab", " ab  ab", "ab 😀 한 ab", "   ", "", "\nab\n"])
def test_sentencepiece_pieces(text):
    backend = sentencepiece_tokenizer()
    tokenizer = make(backend)
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == backend.decode(ids) == text


def test_sentencepiece_keeps_the_space_of_a_continuation():
    tokenizer = make(sentencepiece_tokenizer())
    ids = tokenizer.encode("ab ab")
    assert "".join(stream(tokenizer, ids, continues_text=True)) == " ab ab"
    assert "".join(stream(tokenizer, [1, *ids])) == "ab ab", "a skipped <s> is no text to continue"


def test_sentencepiece_bytes_cut_inside_a_character_keep_the_characters_before():
    tokenizer = make(sentencepiece_tokenizer())
    ids = tokenizer.encode("한국")[:-1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "한\ufffd"


# Decoders of other kinds


def test_a_decoder_that_joins_by_rules_of_its_own():
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "##ly": 3, ",": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = make(backend)
    ids = [1, 2, 3, 4, 1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == backend.decode(ids)


def test_no_decoder_at_all():
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = make(backend)
    assert "".join(stream(tokenizer, [0, 1, 0])) == tokenizer.decode([0, 1, 0]) == "a b a"


def test_time_grows_with_the_text_and_not_with_its_square():
    tokenizer = make(byte_tokenizer())
    ids = tokenizer.encode("한" * 20000)
    start = time.perf_counter()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert time.perf_counter() - start < 5, "60,000 tokens; a quadratic decoder takes minutes"


# BOS


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_bos_is_added_as_the_tokenizer_says(in_file, flag):
    config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
    tokenizer = make(byte_tokenizer("<s>" if in_file else None), config)
    adds = in_file if flag is None else flag
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert len(plain) == 2
    assert tokenizer.encode("hi") == ([0] if adds else []) + plain
    assert tokenizer.encode("") == ([0] if adds else []), "'' with BOS is one token, without it none"
    assert tokenizer.encode(" ")[-1:] == tokenizer.encode(" ", add_special_tokens=False)
    assert tokenizer.adds_bos is adds


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
@pytest.mark.parametrize("flag", [False, True])
def test_exactly_one_bos_in_chat(template, flag):
    config = {"bos_token": "<s>", "add_bos_token": flag, "chat_template": template}
    tokenizer = make(byte_tokenizer("<s>"), config)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hey"}])
    assert ids.count(0) == (1 if flag or "bos_token" in template else 0)
    assert ids[-3:] == tokenizer.encode("hey", add_special_tokens=False)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False) or (flag and ids[0] == 0)


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert len(make(backend).encode("0123456789")) == 10


# EOS


@pytest.mark.parametrize(
    ("tokenizer_eos", "config", "generation", "expected"),
    [
        ("</s>", 2, [2, 7], {1, 2, 7}),
        ("</s>", [3, 4], 5, {1, 3, 4, 5}),
        (None, 2, None, {2}),
        (None, None, [0], {0}),
        ({"content": "</s>", "special": True}, None, None, {1}),
        ("not in the vocabulary", None, None, set()),
        (None, None, None, set()),
    ],
)
def test_every_source_of_eos_counts(tokenizer_eos, config, generation, expected):
    files = {} if generation is None else {"generation_config__json": json.dumps({"eos_token_id": generation})}
    tokenizer = make(byte_tokenizer(), {"eos_token": tokenizer_eos}, {"eos_token_id": config}, **files)
    assert set(tokenizer.eos_token_ids) == expected
    assert len(tokenizer.eos_token_ids) == len(expected)


def test_special_tokens_map_is_read_too():
    tokenizer = make(byte_tokenizer(), special_tokens_map__json=json.dumps({"bos_token": {"content": "<s>"}}))
    assert tokenizer.bos_token_id == 0 and tokenizer.special_tokens == {"bos_token": "<s>"}


def test_saving_keeps_everything(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = make(
        byte_tokenizer(), config, {"eos_token_id": 9}, chat_template__jinja="{{ messages[0].content }}\r\n"
    )
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.encode("hi <|end|>") == tokenizer.encode("hi <|end|>")
    assert set(loaded.eos_token_ids) == {1, 9}
    messages = [{"role": "user", "content": "x"}]
    assert loaded.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == tokenizer._files["tokenizer.json"]


# Added tokens


def test_tokens_of_the_config_are_added():
    added = {"259": {"content": "<extra>", "special": True}, "0": {"content": "<s>", "special": True}}
    tokenizer = make(byte_tokenizer(), {"added_tokens_decoder": added})
    assert tokenizer.encode("a<extra>")[-1] == 259
    assert tokenizer.decode([259]) == "" and tokenizer.decode([259], skip_special_tokens=False) == "<extra>"
    assert tokenizer.convert_ids_to_tokens([0, 259, 999]) == ["<s>", "<extra>", None]
    assert tokenizer.convert_tokens_to_ids(["<extra>", "none"]) == [259, None]
    with pytest.raises(ValueError, match=r"gives '<extra>' the id 300"):
        make(byte_tokenizer(), {"added_tokens_decoder": {"300": {"content": "<extra>"}}})


# Chat templates


def chat(template, messages=None, **variables):
    tokenizer = make(byte_tokenizer(), {"bos_token": "<s>", "chat_template": template})
    return tokenizer.apply_chat_template(
        messages or [{"role": "user", "content": "x<y>&'"}], tokenize=False, **variables
    )


def test_the_environment_of_hugging_face_templates():
    assert chat("  {% if true %}\n{{ messages[0].content }}\n  {% endif %}\n") == "x<y>&'\n", "trim and lstrip blocks"
    assert chat("{{ messages[0] | tojson }}") == '{"role": "user", "content": "x<y>&\'"}', "no HTML escapes"
    assert chat("{{ messages | tojson(indent=1) }}").startswith('[\n {\n  "role"')
    assert chat("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert chat("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"
    assert chat("{{ strftime_now('%Y') }}").isdigit()
    assert chat("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ name }}", name="N") == "<s>TrueTrueN"
    assert chat("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_templates_by_name_and_from_a_file():
    several = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
        {"name": "rag", "template": "R"},
    ]
    assert chat(several) == "D"
    assert chat(several, tools=[{"type": "function"}]) == "T"
    assert chat(several, chat_template="rag") == "R"
    assert chat({"default": "dict"}) == "dict"
    assert chat("config", chat_template="given {{ messages | length }}") == "given 1"
    with_file = make(byte_tokenizer(), {"chat_template": "config"}, chat_template__jinja="file")
    assert with_file.apply_chat_template([{"role": "user"}], tokenize=False) == "file", "the file comes first"
    assert with_file.has_chat_template
    with pytest.raises(ValueError, match=r"no default chat template.*\['rag'\]"):
        chat([{"name": "rag", "template": "R"}])


def test_what_chat_refuses():
    with pytest.raises(ValueError, match="no chat template"):
        make(byte_tokenizer()).apply_chat_template([{"role": "user", "content": ""}])
    with pytest.raises(ValueError, match="refuses this conversation: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="chat template"):
        chat("{% if %}")
    with pytest.raises(ValueError, match="chat template"):
        chat("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")  # templates run in a sandbox
    with pytest.raises(TypeError, match="a chat message must be a mapping"):
        chat("x", messages=["hello"])


# Bad input


def test_bad_input(tmp_path):
    tokenizer = make(byte_tokenizer())
    with pytest.raises(TypeError, match="text must be a string, got list"):
        tokenizer.encode(["a"])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid"):
        Tokenizer({"tokenizer.json": "{}"})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer({"tokenizer.json": byte_tokenizer().to_str(), "tokenizer_config.json": "{"})
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"needs the contents of tokenizer\.json"):
        Tokenizer({})
