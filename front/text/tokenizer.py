"""The tokenizer of a Hugging Face model directory, on the `tokenizers` library alone.

Reads tokenizer.json (or tiktoken.model: front/text/tiktoken_file.py) and, where present, tokenizer_config.json,
special_tokens_map.json, generation_config.json, config.json, chat_template.jinja and
additional_chat_templates/*.jinja. Encoding is that of transformers' AutoTokenizer: when there is a tokenizer.json, its
post-processor alone decides about BOS and EOS (add_bos_token of tokenizer_config.json is ignored).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from front.chat.deepseek_v4 import DeepseekV4Encoding
from front.chat.deepseek_v32 import DeepseekV32Encoding
from front.chat.dsml import DsmlEncoding
from front.text import tiktoken_file
from front.text.chat_template import ChatTemplate, Encoding
from front.text.detokenizer import Detokenizer, TableDetokenizer, TokenTable, WindowDetokenizer, byte_level_alphabet
from front.text.token_bound import TokenizerFile, longest_token

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# How conversations with models are written whose checkpoints have no template, by architecture.
_ENCODINGS: dict[str, type[DsmlEncoding]] = {
    "DeepseekV32ForCausalLM": DeepseekV32Encoding,
    "DeepseekV4ForCausalLM": DeepseekV4Encoding,
}
_WINDOW_CONTEXT = 6  # prompt tokens that a window decoder sees before the output


class Tokenizer:
    """Text to tokens and back, and the chat template.

    vocab_size: one more than the largest token id. The model's may be larger (padded).
    """

    def __init__(self, model_dir: str | Path, tokenizer_dir: str | Path = "") -> None:
        """tokenizer_dir: where the tokenizer's files are; "": the model's directory, which has config.json and
        generation_config.json. ValueError naming the file when tokenizer.json is missing or cannot be read."""
        self.model_dir = Path(model_dir)
        directory = Path(tokenizer_dir or model_dir)
        path = directory / "tokenizer.json"
        config = _read_json(directory / "tokenizer_config.json")
        data = _tokenizer_json(path, config)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
            file = msgspec.json.decode(data, type=TokenizerFile)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a tokenizer file: {_one_line(error)}") from None
        self.directory = directory
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._longest = longest_token(file)

        self._named = _named_tokens(config, _read_json(directory / "special_tokens_map.json"))
        self._mark_special(config)
        self.bos_token = self._named.get("bos_token")
        self.eos_token = self._named.get("eos_token")
        self.pad_token = self._named.get("pad_token")
        self.bos_token_id = self._id(self.bos_token)
        self.pad_token_id = self._id(self.pad_token)
        self.eos_token_ids = self._eos_ids(self.model_dir)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.vocab_size = max([self._tokenizer.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        self._table = self._make_table(file.decoder)
        self._hidden_of: dict[tuple[str, ...], frozenset[int]] = {}
        self._templates: dict[str, Encoding] = {
            name: ChatTemplate(source, self._named) for name, source in _template_sources(directory, config).items()
        }
        architectures = _read_json(self.model_dir / "config.json").get("architectures") or ()
        encoding = next((_ENCODINGS[name] for name in architectures if name in _ENCODINGS), None)
        if not self._templates and encoding is not None:
            self._templates["default"] = encoding()

    def info(self) -> dict[str, Any]:
        """What tokenizer_config.json says, with the chat template in use. tokenizer_class: transformers' name."""
        config = _read_json(self.directory / "tokenizer_config.json")
        known = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        template = self.chat_template
        return known if template is None else {**known, "chat_template": template}

    # ---- encoding ----

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Other threads run meanwhile. (`encode` of the library holds the interpreter; `encode_batch_fast` does not,
        and leaves out the offsets, which nothing here reads.)"""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            [_encodable(text) for text in texts], add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def encode_bit(self, text: str) -> list[int]:
        """A few characters, without special tokens around them: in this thread alone, which is sooner."""
        ids: list[int] = self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No encoding of this text has fewer tokens; 0 where nothing is known of this kind of tokenizer."""
        return 0 if self._longest is None else len(text) // self._longest

    # ---- decoding ----

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, shown: tuple[str, ...] = ()
    ) -> Detokenizer:
        """For one output that follows this prompt. shown: special tokens that are part of one of these texts are not
        skipped."""
        hidden = self._hidden(shown) if skip_special_tokens else frozenset[int]()
        if self._table is None:
            return WindowDetokenizer(lambda ids: self._decode(ids, hidden), prompt_token_ids[-_WINDOW_CONTEXT:])
        at_start = not skip_special_tokens and not prompt_token_ids
        if skip_special_tokens:
            at_start = all(token_id in self.special_ids for token_id in prompt_token_ids)
        return TableDetokenizer(self._table.hiding(hidden), skip_special_tokens, at_start)

    def _hidden(self, shown: tuple[str, ...]) -> frozenset[int]:
        """The special tokens without those that are part of one of these texts."""
        if not shown:
            return self.special_ids
        if shown not in self._hidden_of:
            texts = {token_id: str(self._tokenizer.id_to_token(token_id)) for token_id in self.special_ids}
            seen = [token_id for token_id, text in texts.items() if any(text in tag for tag in shown)]
            self._hidden_of[shown] = self.special_ids.difference(seen)
        return self._hidden_of[shown]

    def _decode(self, token_ids: Sequence[int], hidden: frozenset[int]) -> str:
        if hidden == self.special_ids:
            return self.decode(token_ids)
        return self.decode([token_id for token_id in token_ids if token_id not in hidden], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes, as they stand inside a text; also of half a character and of special tokens."""
        if self._table is not None:
            return self._table.bytes_of(token_id)
        token = self._tokenizer.id_to_token(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode() if token is not None else b""

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it, such as "Ġis"; "": there is none."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def token_str(self, token_id: int) -> str:
        """The token as one piece of text; U+FFFD where it is only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # ---- chat ----

    @property
    def chat_template(self) -> str | None:
        """The default template's source."""
        template = self._templates.get("default")
        return template.source if template is not None else None

    @property
    def format_marks(self) -> str:
        """In which the formats of calls and of reasoning are recognised: the templates' texts."""
        return "".join(template.marks for template in self._templates.values())

    def compile_templates(self) -> None:
        """What else the first conversation waits for. ValueError, on one line: one does not parse."""
        for template in self._templates.values():
            template.compile()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text: encode it with add_special_tokens=False, since templates write BOS themselves.

        chat_template: source used instead of the model's. kwargs are the template's (enable_thinking, ...).
        ValueError on one line: there is no template, or it refuses.
        """
        template: Encoding | None
        if chat_template is not None:
            template = ChatTemplate(chat_template, self._named)
        else:
            template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise ValueError("this model has no chat template (tokenizer_config.json or chat_template.jinja)")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )

    # ---- reading the directory ----

    def _id(self, token: str | None) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token) if token is not None else None
        return token_id

    def _mark_special(self, config: Mapping[str, Any]) -> None:
        """Named tokens, and those that tokenizer_config.json calls special, are special even if tokenizer.json forgot.

        Only tokens that the vocabulary has: adding others would make ids that the model does not know.
        """
        names = list(self._named.values())
        declared = config.get("added_tokens_decoder")
        if isinstance(declared, Mapping):
            names += [
                item["content"] for item in declared.values() if isinstance(item, Mapping) and item.get("special")
            ]
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        missing = [name for name in dict.fromkeys(names) if name not in known and self._id(name) is not None]
        if missing:
            self._tokenizer.add_special_tokens(
                [tokenizers.AddedToken(name, special=True, normalized=False) for name in missing]
            )

    def _eos_ids(self, directory: Path) -> tuple[int, ...]:
        """generation_config.json, then config.json, then the tokenizer's own EOS: every id that any of them names."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            found += [item for item in ids if isinstance(item, int)]
        own = self._id(self.eos_token)
        if own is not None:
            found.append(own)
        return tuple(dict.fromkeys(found))

    def _make_table(self, decoder: Mapping[str, Any] | None) -> TokenTable | None:
        kind = _decoder_kind(decoder)
        if kind is None:
            return None
        alphabet = byte_level_alphabet()
        id_to_token = self._tokenizer.id_to_token

        def byte_level(token_id: int) -> bytes:
            token = id_to_token(token_id)
            if token is None:
                return b""
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:  # an added token, written as it is
                return str(token).encode()

        def byte_fallback(token_id: int) -> bytes:
            token = id_to_token(token_id)
            if token is None:
                return b""
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return str(token).replace("▁", " ").encode()

        def words(token_id: int) -> bytes:
            token = id_to_token(token_id)
            return b"" if token is None else f" {token}".encode()

        bytes_of = {"byte_level": byte_level, "words": words}.get(kind, byte_fallback)
        strips_start = kind in ("words", "byte_fallback_strip")
        return TokenTable(self.vocab_size, bytes_of, self.special_ids, strips_start)


def _decoder_kind(decoder: Mapping[str, Any] | None) -> str | None:
    """words, byte_level, byte_fallback, byte_fallback_strip, or None when a table cannot stand for this decoder."""
    if decoder is None:  # `tokenizers` then joins the tokens with spaces
        return "words"
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return "byte_level"
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    common = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if parts == common:
        return "byte_fallback"
    if parts == [*common, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return "byte_fallback_strip"
    return None


def _tokenizer_json(path: Path, config: Mapping[str, Any]) -> bytes:
    """The file's, or what it would say where the directory has a tiktoken.model in its place."""
    if path.is_file():
        return path.read_bytes()
    ranks = path.parent / tiktoken_file.NAME
    if not ranks.is_file():
        raise ValueError(f"{path}: no such file; a model directory needs a tokenizer.json, or {ranks.name}")
    return tiktoken_file.as_tokenizer_json(ranks, config)


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; {} when there is no such file. ValueError when it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a JSON object: {_one_line(error)}") from None


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, from the first file that has each; a token is a string or {"content": string}."""
    named: dict[str, str] = {}
    for config in configs:
        for name in _NAMED_TOKENS:
            value = config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                named.setdefault(name, value)
    return named


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. Files win over tokenizer_config.json, which holds a string or a list of {name, template}."""
    sources: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):
        for item in declared:
            if not isinstance(item, Mapping) or not {"name", "template"} <= item.keys():
                raise ValueError(f"{directory / 'tokenizer_config.json'}: chat_template: items need name and template")
            sources[str(item["name"])] = str(item["template"])
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return sources


def _encodable(text: str) -> str:
    """Lone surrogates cannot be UTF-8; they come in JSON as \\ud800 escapes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds a lone surrogate at character {error.start}") from None
    return text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
