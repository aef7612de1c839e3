"""Tokenizers rebuilt from GGUF give the ids of the tokenizer they were written from."""

import itertools
import json
import random

import pytest
from checkpoint_files import (
    CONFIG,
    CORPUS,
    DIGIT_TEXTS,
    SPECIAL,
    TEXTS,
    byte_level_tokenizer,
    hf_tensors,
    write_gguf,
)
from tokenizers import Regex, normalizers, pre_tokenizers

from flax_paged.checkpoint.gguf import GGUFSource
from flax_paged.loading import load_generation_config, load_tokenizer

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_tokenizer(path, tokens, types, *, model="gpt2", pre="gpt-2", merges=None, scores=None, edit=None):
    """Write a tiny model with this tokenizer, and load the tokenizer back."""

    def add(writer):
        writer.add_tokenizer_model(model)
        if pre:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if merges is not None:
            writer.add_token_merges(merges)
        if scores is not None:
            writer.add_token_scores(scores)
        if edit:
            edit(writer)

    config = CONFIG | {"vocab_size": len(tokens)}
    return write_gguf(path, config, hf_tensors(config), edit=add)


def from_backend(path, backend, pre, user_defined=(), edit=None):
    """Write a byte-level `tokenizers.Tokenizer` as llama.cpp's converter does."""
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    types = [CONTROL if t in SPECIAL else USER_DEFINED if t in user_defined else NORMAL for t in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return write_tokenizer(path, tokens, types, pre=pre, merges=merges, edit=edit)


# What the Hugging Face tokenizers of these names do, as their tokenizer.json says.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
STYLES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
}


@pytest.mark.parametrize("pre", STYLES)
def test_byte_level_ids_equal_the_original(tmp_path, pre):
    backend = byte_level_tokenizer(STYLES[pre])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_tokens(["<think>", "    "])  # user-defined: matched in text, kept by decode
    path = from_backend(tmp_path / "m.gguf", backend, pre, user_defined=("<think>", "    "))
    tokenizer = load_tokenizer(path)
    for text in [*TEXTS, *DIGIT_TEXTS, *CORPUS, "<think>deep    </think>"]:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == backend.decode(expected), text
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_the_styles_really_differ(tmp_path):
    ids = set()
    for pre in STYLES:
        backend = byte_level_tokenizer(STYLES["gpt-2"])
        tokenizer = load_tokenizer(from_backend(tmp_path / f"{pre}.gguf", backend, pre))
        ids.add(tuple(tokenizer.encode("we'LL see 12345 (a)\n\n x e\u0301", add_special_tokens=False)))
    assert len(ids) == len(STYLES)


@pytest.mark.parametrize("pre", [None, "my-own-splitter"])
def test_an_unknown_pre_tokenizer_is_refused(tmp_path, pre):
    path = from_backend(tmp_path / "m.gguf", byte_level_tokenizer(), pre)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre=.*ids would be wrong"):
        load_tokenizer(path)


def test_the_default_pre_tokenizer_warns(tmp_path):
    path = from_backend(tmp_path / "m.gguf", byte_level_tokenizer(), "default")
    with pytest.warns(UserWarning, match="the converter did not know this tokenizer"):
        tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("a, b: 1234567")) == "a, b: 1234567"


@pytest.mark.parametrize(
    ("model", "message"),
    [("rwkv", "tokenizer.ggml.model='rwkv'"), ("bert", "expected 'gpt2'"), (None, "expected 'gpt2'")],
)
def test_other_tokenizers_are_refused(tmp_path, model, message):
    def edit(writer):
        if model:
            writer.add_tokenizer_model(model)
            writer.add_token_list(["a", "b"])

    path = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG), edit=edit)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_a_token_listed_twice_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "m.gguf", ["a", "b", "a"], [1, 1, 1], merges=[])
    with pytest.raises(ValueError, match="'a' is in the vocabulary twice"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_flags(tmp_path, pre, flag, adds):
    def edit(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if flag is not None:
            writer.add_add_bos_token(flag)

    tokenizer = load_tokenizer(from_backend(tmp_path / "m.gguf", byte_level_tokenizer(), pre, edit=edit))
    assert tokenizer.adds_bos is adds
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == ([1, *plain] if adds else plain)
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == (2,)


def test_end_ids_and_chat_template(tmp_path):
    def edit(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(2)
        writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")

    path = from_backend(tmp_path / "m.gguf", byte_level_tokenizer(), "gpt-2", edit=edit)
    tokenizer = load_tokenizer(path)
    assert set(tokenizer.eos_token_ids) == {0, 2}
    assert load_generation_config(path)["eos_token_id"] == [0, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False) == "<|im_start|>hey"


# SentencePiece BPE


def random_words(num_lines, seed):
    """Words of few letters, in which many merges compete for each letter."""
    rng = random.Random(seed)
    return [" ".join("".join(rng.choices("abcde", k=rng.randrange(2, 9))) for _ in range(6)) for _ in range(num_lines)]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    root = tmp_path_factory.mktemp("spm")
    lines = [line for text in CORPUS for line in text.splitlines() if line.strip()]
    (root / "corpus.txt").write_text("\n".join(lines + random_words(300, seed=0)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "corpus.txt"),
        model_prefix=str(root / "m"),
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(root / "m.model"))


def write_sentencepiece(path, model, edit=None):
    ids = range(model.get_piece_size())
    types = [
        UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        for i in ids
    ]

    def add(writer):
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_unk_token_id(model.unk_id())
        if edit:
            edit(writer)

    tokens, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    return write_tokenizer(path, tokens, types, model="llama", pre=None, scores=scores, edit=add)


def sentencepiece_texts():
    rng = random.Random(0)
    words = ["the", "quick", "fox", "jumps", "12", "č", "한", "日", "😀", "Don't", "(", ")", "{x}", "\t", "\n"]
    generated = [" ".join(rng.choices(words, k=rng.randrange(1, 20))) for _ in range(100)]
    return [
        text for text in [*TEXTS, *DIGIT_TEXTS, *CORPUS, *generated, *random_words(100, seed=1)] if "<|" not in text
    ]


def test_sentencepiece_ids_equal_sentencepiece(tmp_path, sentencepiece_model):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", sentencepiece_model))
    for text in sentencepiece_texts():
        expected = sentencepiece_model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *expected]
        assert tokenizer.decode(expected) == sentencepiece_model.decode(expected) == text, text


def test_sentencepiece_without_a_space_before_the_first_word(tmp_path, sentencepiece_model):
    path = write_sentencepiece(
        tmp_path / "m.gguf", sentencepiece_model, lambda writer: writer.add_add_space_prefix(False)
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("fox jumps")) == "fox jumps"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("fox", add_special_tokens=False))[0][0] != "▁"


# SmolLM2's own file


def bpe_oracle(metadata):
    """An encoder in plain Python: digits apart, GPT-2's pattern, merges by rank."""
    regex = pytest.importorskip("regex")
    tokens = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    word = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    digit = regex.compile(r"(\p{N})")
    specials = [t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    special = regex.compile("(" + "|".join(map(regex.escape, sorted(specials, key=len, reverse=True))) + ")")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def merge(piece):
        parts = [letters[byte] for byte in piece.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            best = min(pairs, key=ranks.__getitem__)
            at = next(i for i, pair in enumerate(itertools.pairwise(parts)) if pair == best)
            parts[at : at + 2] = ["".join(best)]
        return [tokens[part] for part in parts]

    def encode(text):
        ids = []
        for part in special.split(text):
            if part in specials:
                ids.append(tokens[part])
                continue
            for piece in digit.split(part):
                for found in word.findall(piece):
                    ids += merge(found)
        return ids

    return encode


@pytest.mark.smollm2
def test_smollm2_ids_equal_an_independent_encoder(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    oracle = bpe_oracle(GGUFSource(smollm2_path).metadata)
    rng = random.Random(0)
    characters = "".join(TEXTS) + "0123456789 \n\t" * 4
    noise = ["".join(rng.choices(characters, k=60)) for _ in range(100)]
    for text in [*TEXTS, *DIGIT_TEXTS, *CORPUS, *noise]:
        ids = tokenizer.encode(text)
        assert ids == oracle(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == 49152
    assert tokenizer.adds_bos is False and tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == (2,)


@pytest.mark.smollm2
def test_smollm2_chat(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}], tokenize=False)
    assert text.endswith("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}])
    assert ids == tokenizer.encode(text) and ids.count(1) == 3
