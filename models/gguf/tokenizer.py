"""From a GGUF file's vocabulary, merges and token types to tokenizer.json and tokenizer_config.json.

Two kinds: "gpt2", merges of bytes, whose text is cut beforehand in one of several ways (`tokenizer.ggml.pre`), and
"llama", SentencePiece's merges, whose order follows from scores.
"""

from __future__ import annotations

from typing import Any

from models.fields import ConfigError
from models.gguf.config import Metadata

_CONTROL, _USER_DEFINED = 3, 4  # token types
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


# What cuts the text before its bytes are merged.
_CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [{**_BYTE_LEVEL, "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}],
    "qwen2": [_split(_QWEN2), {**_BYTE_LEVEL, "use_regex": False}],
    "llama-bpe": [_split(_LLAMA3), {**_BYTE_LEVEL, "use_regex": False}],
    "deepseek-v3": [_split(r"\p{N}{1,3}"), _split(_CJK), _split(_DEEPSEEK3), {**_BYTE_LEVEL, "use_regex": False}],
}
_CUTS["deepseek-r1-qwen"] = _CUTS["qwen2"]
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought into its composed form


def tokenizer_files(meta: Metadata) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json, by name."""
    kind = meta.text("tokenizer.ggml.model")
    tokens = meta.texts("tokenizer.ggml.tokens")
    if kind == "gpt2":
        parts = _byte_level(meta, tokens)
    elif kind == "llama":
        parts = _sentencepiece(meta, tokens)
    else:
        raise meta.error("tokenizer.ggml.model", '"gpt2" or "llama"')
    config = _config(meta, tokens)
    if config["add_bos_token"] and "bos_token" in config:
        parts["post_processor"] = _with_bos(config["bos_token"], tokens.index(config["bos_token"]))
    raw = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(meta, tokens), **parts}
    return {"tokenizer.json": raw, "tokenizer_config.json": config}


def _byte_level(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    pre = meta.text("tokenizer.ggml.pre", "gpt-2")
    if pre not in _CUTS:
        raise meta.error("tokenizer.ggml.pre", f"one of {', '.join(_CUTS)}")
    known = set(tokens)
    merges = [merge.split(" ", 1) for merge in meta.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
            raise ConfigError(f"{meta.source}: tokenizer.ggml.merges: {merge} are not of the vocabulary")
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[pre]},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": _model(tokens, merges),
    }


def _model(tokens: list[str], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    usual = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {**usual, **more, "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}


def _sentencepiece(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    """A merge of two tokens comes the earlier the higher the score of what they make."""
    scores = meta.numbers("tokenizer.ggml.scores")
    ids = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = sorted((ids[left], ids[right]) for left, right in cuts if left in ids and right in ids)
        found += [(score, pair) for pair in pairs]
    merges = [[tokens[left], tokens[right]] for _, (left, right) in sorted(found, key=lambda item: -item[0])]
    unknown = meta.raw("tokenizer.ggml.unknown_token_id")
    prefix = meta.raw("tokenizer.ggml.add_space_prefix") is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, replace] if prefix else [replace]
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unk_token = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _model(tokens, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True),
    }


def _added(meta: Metadata, tokens: list[str]) -> list[dict[str, Any]]:
    types = meta.numbers("tokenizer.ggml.token_type") if meta.raw("tokenizer.ggml.token_type") is not None else []
    return [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip


def _config(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"add_bos_token": meta.raw("tokenizer.ggml.add_bos_token") is True}
    if meta.text("tokenizer.ggml.model") == "llama":
        config["add_bos_token"] = meta.raw("tokenizer.ggml.add_bos_token") is not False
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = meta.raw(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    if meta.raw("tokenizer.chat_template") is not None:
        config["chat_template"] = meta.text("tokenizer.chat_template")
    return config


def _with_bos(token: str, number: int) -> dict[str, Any]:
    own = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [own, first],
        "pair": [own, first, own, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
