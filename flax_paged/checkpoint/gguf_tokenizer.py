"""Rebuild a Hugging Face tokenizer from the vocabulary in a GGUF file's metadata, so that ids are the same."""

import json
import warnings
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> kind of pre-tokenizer. A name that is not here would give other ids than the model was trained
# with, so it is refused.
_PRE_TOKENIZERS = {
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "qwen2": "qwen2",
    "tekken": "tekken",
    "default": "default",
}
_WHOLE_WORDS_FIRST = ("llama3", "tekken")  # kinds that take a word found in the vocabulary without merging


def tokenizer_files(metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a GGUF tokenizer as the contents of Hugging Face's files.

    Args:
        metadata: Metadata of a GGUF file.
        where: The file's name, for messages.

    Returns:
        By file name: `tokenizer.json` (a JSON string), `tokenizer_config.json` and `generation_config.json` (dicts).

    Raises:
        ValueError: The file has no tokenizer, or one we cannot rebuild exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(
            f"{where}: tokenizer.ggml.model={kind!r}: expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE). "
            "Load the tokenizer from the model's Hugging Face folder instead."
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"{where}: the token {twice!r} is in the vocabulary twice.")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(metadata, vocab, where)
    else:
        tokenizer, adds_bos = _sentencepiece_bpe(metadata, tokens, vocab, types)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type != _USER_DEFINED, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED) or (token_type == _UNKNOWN and kind == "llama")
        ]
    )
    config = _tokenizer_config(metadata, tokens, adds_bos)
    _set_post_processor(tokenizer, config, vocab)
    ids = {
        f"{name}_token_id": vocab[config[f"{name}_token"]]
        for name in ("bos", "eos", "pad")
        if f"{name}_token" in config
    }
    turn_ends = [
        metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    ]
    if turn_ends and "eos_token_id" in ids:
        ids["eos_token_id"] = list(dict.fromkeys([ids["eos_token_id"], *turn_ends]))
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config, "generation_config.json": ids}


def _byte_level_bpe(metadata: dict[str, Any], vocab: dict[str, int], where: str) -> tuple[Tokenizer, bool]:
    """Return a GPT-2 style tokenizer and whether llama.cpp adds BOS where the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre={pre!r}: how this tokenizer splits words is not known to us, so ids would "
            f"be wrong. Expected one of {sorted(_PRE_TOKENIZERS)}; or load the tokenizer from the Hugging Face folder."
        )
    style = _PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=style in _WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(style, where)
    tokenizer.decoder = decoders.ByteLevel()
    if style == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, style == "llama3"


def _pre_tokenizer(style: str, where: str) -> pre_tokenizers.PreTokenizer:
    """Return how a byte-level BPE splits text into words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style == "gpt2":
        return byte_level
    if style == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if style == "default":
        warnings.warn(
            f"{where}: tokenizer.ggml.pre is 'default': the converter did not know this tokenizer. Words are split as "
            "llama.cpp does, which may not be how the model was trained.",
            stacklevel=2,
        )
        split = [
            pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"),
            byte_level,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
        return pre_tokenizers.Sequence(split)
    pattern = {"llama3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}[style]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _sentencepiece_bpe(
    metadata: dict[str, Any], tokens: list[str], vocab: dict[str, int], types: list[int]
) -> tuple[Tokenizer, bool]:
    """Return a Llama 1/2 style tokenizer: BPE by piece score, unknown characters as bytes, spaces as `▁`."""
    scores = metadata["tokenizer.ggml.scores"]
    added = {
        token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(tokens, vocab, scores, added),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list = [normalizers.Replace(" ", "▁")]
    undo: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer, True


def _merges_by_score(
    tokens: list[str], vocab: dict[str, int], scores: list[float], added: set[str]
) -> list[tuple[str, str]]:
    """Return BPE merges, best first, such that merging by rank does what SentencePiece does by score."""
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        if token in added:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if all(part in vocab and part not in added for part in pair)]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, pair) for pair in pairs]
    merges.sort(key=lambda merge: -merge[0])  # stable: equal scores keep the order of the vocabulary
    return [pair for _, pair in merges]


def _tokenizer_config(metadata: dict[str, Any], tokens: list[str], adds_bos: bool) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`: special tokens, flags and chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None and 0 <= index < len(tokens):
            config[f"{ours}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    if context := metadata.get(f"{metadata.get('general.architecture')}.context_length"):
        config["model_max_length"] = context
    return config


def _set_post_processor(tokenizer: Tokenizer, config: dict[str, Any], vocab: dict[str, int]) -> None:
    """Make the tokenizer add BOS and EOS where the flags say so."""
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    if bos or eos:
        names = [name for name in (bos, "$A", eos) if name]
        special = [(name, vocab[name]) for name in {bos, eos} if name]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(names),
            pair=" ".join(names) + " " + " ".join(f"{name}:1" if name != "$A" else "$B:1" for name in names),
            special_tokens=special,
        )


def dump_tokenizer_files(files: dict[str, Any]) -> dict[str, str]:
    """Return the contents of tokenizer files as text ready to write."""
    return {
        name: content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for name, content in files.items()
    }
