"""From the bytes of a body to prompts as token ids: everything about a request whose cost grows with its size.

Pure and synchronous. `Service` calls it in place for small bodies, and in a process of its own for large ones
(server/intake_process.py), because parsing, templates and tokenizers hold the interpreter while streams wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from configs.engine import Plan
from configs.server import ServerConfig
from front.chat.families import REASONING
from front.sampling_params import room_for_output
from front.text.tokenizer import Tokenizer
from server.api import conversation, messages, responses
from server.api.conversation import chat_of, predicted_text, render_messages, template_kwargs, text_of
from server.api.messages import MessagesRequest
from server.api.openai import (
    BatchChatRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    GenerationRequest,
    Tokenized,
    TokenizeRequest,
)
from server.api.params import FIELDS, check_chat, check_common, check_completion, either
from server.api.responses import ResponsesRequest
from server.api.tokens import TokensRequest, to_completion
from server.api.tools import OutputFormats, tool_use
from server.api.unknown import check_unknown
from server.errors import ApiError, bad_request, from_decode_error, from_value_error
from server.taken import Answered, Kind, Prompts, Refused, Taken, pack, unpack

Body = TypeVar("Body")
FORMS: dict[Kind, type[msgspec.Struct]] = {
    "completion": CompletionRequest,
    "tokens": TokensRequest,
    "chat": ChatRequest,
    "batch": BatchChatRequest,
    "responses": ResponsesRequest,
    "compact": ResponsesRequest,
    "messages": MessagesRequest,
}
ANSWER_FACTOR = 8  # an answer about tokens may have so many times the bytes that a body may

_encode = msgspec.json.Encoder().encode
_completion_decoder = msgspec.json.Decoder(CompletionRequest, strict=False)
_tokens_decoder = msgspec.json.Decoder(TokensRequest, strict=False)
_chat_decoder = msgspec.json.Decoder(ChatRequest, strict=False)
_batch_decoder = msgspec.json.Decoder(BatchChatRequest, strict=False)
_responses_decoder = msgspec.json.Decoder(ResponsesRequest, strict=False)
_messages_decoder = msgspec.json.Decoder(MessagesRequest, strict=False)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest, strict=False)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest, strict=False)


def decoded(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """ApiError 400 for what does not parse."""
    if not body:
        raise bad_request("the body is empty; a JSON object is needed", code="invalid_json")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise from_decode_error(error) from None


def known_model(names: Sequence[str], wanted: str | None) -> str:
    """The served name. ApiError 404 when it is another's; none given means the first."""
    if not wanted:
        return names[0]
    if wanted not in names:
        raise ApiError(404, f"the model {wanted!r} does not exist", param="model", code="model_not_found")
    return wanted


class Intake:
    """vocab_size: of the model, see Service.vocab_size."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan, config: ServerConfig) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._config = config
        self.formats = OutputFormats(tokenizer, config)

    def take(self, kind: Kind, body: bytes, vocab_size: int, serving: bool, earlier: bytes = b"") -> Taken:
        """What is wrong with it comes back as Refused. serving: false: a generating request is looked at, and no
        more. earlier: items of the conversation before it (/v1/responses), as JSON."""
        try:
            if kind == "tokenize":
                return Answered(self._tokenize(decoded(body, _tokenize_decoder)))
            if kind == "detokenize":
                return Answered(self._detokenize(decoded(body, _detokenize_decoder), vocab_size))
            taken = self._generating(kind, body, earlier, vocab_size, serving)
            if isinstance(taken, Prompts):
                taken.ignored = check_unknown(body, FORMS[kind])
            return taken
        except ApiError as error:
            return Refused(error.status, error.message, error.param, error.code)

    # ---- generating ----

    def _generating(
        self, kind: Kind, body: bytes, earlier: bytes, vocab_size: int, serving: bool
    ) -> Prompts | Answered:
        if kind == "completion":
            return self._completion(decoded(body, _completion_decoder), vocab_size, serving)
        if kind == "tokens":
            return self._tokens(decoded(body, _tokens_decoder), vocab_size, serving)
        if kind == "chat":
            return self._chat(decoded(body, _chat_decoder), vocab_size, serving)
        if kind == "batch":
            return self._batch(decoded(body, _batch_decoder), vocab_size, serving)
        if kind in ("responses", "compact", "input_tokens"):
            response = decoded(body, _responses_decoder)
            if kind == "compact":
                response = responses.compacting(response, bool(earlier))
            return self._responses(response, earlier, vocab_size, serving, kind == "input_tokens")
        return self._messages(decoded(body, _messages_decoder), vocab_size, serving, kind == "count_tokens")

    def _completion(self, body: CompletionRequest, vocab_size: int, serving: bool) -> Prompts:
        model = self._checked(body, vocab_size)
        check_completion(body)
        prompt, body.prompt = body.prompt, None
        if not serving:
            return Prompts(completion=body, model=model)
        texts, lists = split_prompt(prompt, self._config.max_prompts)
        cut = body.truncate_prompt_tokens
        if texts is not None:
            lists = self._encode(texts, either(body.add_special_tokens, True), "prompt", fitting=cut is None)
        lists = [self._fitted(token_ids, body, body.max_tokens, "prompt", vocab_size) for token_ids in lists]
        if not body.echo:
            texts = None
        elif texts is None or cut is not None:
            skip = either(body.skip_special_tokens, True)
            texts = [self._tokenizer.decode(token_ids, skip) for token_ids in lists]
        return Prompts(completion=body, model=model, token_ids=[pack(token_ids) for token_ids in lists], texts=texts)

    def _tokens(self, body: TokensRequest, vocab_size: int, serving: bool) -> Prompts:
        try:
            return self._completion(to_completion(body), vocab_size, serving)
        except ApiError as error:
            if error.param != "prompt":
                raise
            raise bad_request(error.message.replace("prompt", "token_ids", 1), "token_ids", error.code) from None

    def _chat(self, body: ChatRequest, vocab_size: int, serving: bool) -> Prompts:
        model = self._checked(body, vocab_size)
        check_chat(body)
        use = tool_use(body)
        self.formats.check(use)
        messages, kwargs = body.messages, template_kwargs(body)
        expected, body.prediction = body.prediction, None
        body.messages, body.chat_template_kwargs, body.tools, body.documents = [], None, None, None
        if not serving:
            return Prompts(chat=body, model=model)
        tools = [] if use.mode == "none" and self._config.exclude_tools_when_tool_choice_none else use.tools
        text = self._rendered(messages, body.add_generation_prompt, body.continue_final_message, kwargs, tools)
        cut = body.truncate_prompt_tokens
        (token_ids,) = self._encode([text], either(body.add_special_tokens, False), "messages", fitting=cut is None)
        wanted = either(body.max_completion_tokens, body.max_tokens)
        token_ids = self._fitted(token_ids, body, wanted, "messages", vocab_size)
        prediction = self._encode([predicted_text(expected)], False, "prediction", fitting=False)[0] if expected else []
        check_token_ids(prediction, "prediction", vocab_size)
        last = messages[-1]
        texts = [text_of(last, len(messages) - 1)] if body.echo and last.role == "assistant" else None
        tokens, prediction = [pack(token_ids)], prediction[: self._plan.max_model_len]
        goes_on = text_of(last, len(messages) - 1) if body.continue_final_message else None
        format = self.formats.of(use, text, goes_on)
        return Prompts(
            chat=body,
            model=model,
            token_ids=tokens,
            texts=texts,
            prediction=pack(prediction),
            format=format,
            named_tool=use.named,
            structured_outputs=self.formats.grammar(use, format, body),
        )

    def _batch(self, body: BatchChatRequest, vocab_size: int, serving: bool) -> Prompts:
        """One chat request of several prompts, which all have the same format."""
        asked = {"stream": body.stream, "tools": body.tools, "prediction": body.prediction}
        asked |= {"prompt_logprobs": body.prompt_logprobs is not None, "n": either(body.n, 1) != 1}
        asked["use_beam_search"] = body.use_beam_search
        for field, unfit in asked.items():
            if unfit:
                raise bad_request(f"{field} cannot be had for several conversations", field, "unsupported_parameter")
        count, limit = len(body.messages), self._config.max_prompts
        if not 1 <= count <= limit:
            raise bad_request(f"messages must hold 1 to {limit} conversations, got {count}", "messages")
        shared = {name: getattr(body, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
        each = [self._chat(ChatRequest(messages=one, **shared), vocab_size, serving) for one in body.messages]
        first = each[0]
        if any(prompts.format != first.format for prompts in each):
            raise bad_request("messages: the conversations do not end alike", "messages", "unsupported_parameter")
        if first.token_ids is not None:
            first.token_ids = [packed for prompts in each for packed in prompts.token_ids or ()]
            if any(prompts.texts for prompts in each):
                first.texts = [(prompts.texts or [""])[0] for prompts in each]
        return first

    def _responses(
        self, body: ResponsesRequest, earlier: bytes, vocab_size: int, serving: bool, counts: bool
    ) -> Prompts | Answered:
        chat, items = responses.to_chat(body, msgspec.json.decode(earlier) if earlier else [])
        prompts = self._shortened(chat, vocab_size, serving or counts, body.truncation == "auto")
        if counts:
            return Answered(_encode({"object": "response.input_tokens", "input_tokens": _num_tokens(prompts)}))
        body.input = None
        prompts.responses = body
        prompts.items = _encode(items)
        return prompts

    def _shortened(self, chat: ChatRequest, vocab_size: int, serving: bool, shortens: bool) -> Prompts:
        """shortens: a conversation that is too long loses what is oldest, in front of a user's message."""
        messages, kwargs = chat.messages, chat.chat_template_kwargs

        def attempt(kept: list[ChatMessage]) -> Prompts:
            own = msgspec.structs.replace(chat, messages=kept, chat_template_kwargs=kwargs)
            return self._chat(own, vocab_size, serving)

        cuts = conversation.conversation_cuts(messages) if shortens else [0]
        first, last = 0, len(cuts) - 1  # the smallest cut that fits is among these, or none is
        while True:
            middle = first if first == 0 else (first + last) // 2
            try:
                prompts = attempt(conversation.without(messages, cuts[middle]))
            except ApiError as error:
                if error.code != "context_length_exceeded" or middle == len(cuts) - 1:
                    raise
                first = middle + 1
            else:
                if middle == first:
                    return prompts
                last = middle

    def _messages(self, body: MessagesRequest, vocab_size: int, serving: bool, counts: bool) -> Prompts | Answered:
        chat = messages.to_chat(body, counts)
        if self.formats.reasoning not in REASONING:
            chat.thinking_token_budget = None  # clients ask every model to think
        prompts = self._chat(chat, vocab_size, serving or counts)
        if counts:
            return Answered(_encode({"input_tokens": _num_tokens(prompts)}))
        body.messages, body.system = [], None
        prompts.messages = body
        return prompts

    def _checked(self, body: GenerationRequest, vocab_size: int) -> str:
        """The model's name. What is left of the body is small then."""
        model = known_model(self._plan.served_model_names, body.model)
        check_common(body, self._config, self._plan.scheduling_policy == "priority")
        allowed, field = body.allowed_token_ids, "allowed_token_ids"
        if allowed is not None and len(allowed) > vocab_size:
            raise bad_request(
                f"{field} takes at most the {vocab_size} ids of the vocabulary, got {len(allowed)}", field
            )
        return model

    def _rendered(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        kwargs = {**self._config.chat_template_kwargs, **kwargs}
        return render_messages(
            self._tokenizer,
            self._config.chat_template,
            messages,
            content_parts=self._config.content_parts,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
            tools=tools,
        )

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, field: str, fitting: bool) -> list[list[int]]:
        """fitting: a text that has too many tokens however it is tokenized is refused before that is done."""
        try:
            if fitting:
                fewest = max(self._tokenizer.fewest_tokens(text) for text in texts)
                room_for_output(fewest, self._plan.max_model_len, at_least=True)
            return self._tokenizer.encode_batch(texts, add_special_tokens)
        except ValueError as error:
            message = str(error)
            if "context length" in message:
                raise from_value_error(error, FIELDS, {"prompt": field}) from None
            raise bad_request(f"{field}: {message}", field, "invalid_value") from None

    def _fitted(
        self, token_ids: list[int], body: GenerationRequest, max_tokens: int | None, field: str, vocab_size: int
    ) -> list[int]:
        """Checked, and cut as asked. ApiError 400 also when it leaves no room for output."""
        check_token_ids(token_ids, field, vocab_size)
        limit = self._plan.max_model_len
        token_ids = truncated(token_ids, body.truncate_prompt_tokens, body.truncation_side or "left", max_tokens, limit)
        try:
            room_for_output(len(token_ids), limit)
        except ValueError as error:
            raise from_value_error(error, FIELDS, {"prompt": field}) from None
        return token_ids

    # ---- about tokens ----

    def _tokenize(self, body: TokenizeRequest) -> bytes:
        known_model(self._plan.served_model_names, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "invalid_value")
        if body.messages is None:
            text, special, field = body.prompt or "", either(body.add_special_tokens, True), "prompt"
        else:
            chat = chat_of(body)
            check_chat(chat)
            kwargs, tools = template_kwargs(chat), tool_use(chat).tools
            text = self._rendered(body.messages, body.add_generation_prompt, body.continue_final_message, kwargs, tools)
            special, field = either(body.add_special_tokens, False), "messages"
        (token_ids,) = self._encode([text], special, field, fitting=False)
        strings = [self._tokenizer.piece(token) for token in token_ids] if body.return_token_strs else None
        limit = self._plan.max_model_len
        return self._bounded(
            Tokenized(count=len(token_ids), max_model_len=limit, tokens=token_ids, token_strs=strings), field
        )

    def _detokenize(self, body: DetokenizeRequest, vocab_size: int) -> bytes:
        known_model(self._plan.served_model_names, body.model)
        check_token_ids(body.tokens, "tokens", vocab_size)
        return self._bounded(Detokenized(self._tokenizer.decode(body.tokens, skip_special_tokens=False)), "tokens")

    def _bounded(self, answer: object, field: str) -> bytes:
        data, limit = _encode(answer), ANSWER_FACTOR * self._config.max_body_bytes
        if len(data) > limit:
            message = f"{field}: the answer has {len(data)} bytes, more than the {limit} that one may have"
            raise bad_request(message, field, "answer_too_large")
        return data


def check_token_ids(token_ids: Sequence[int], field: str, limit: int) -> None:
    """ApiError 400."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limit):
        wrong = next(token for token in token_ids if not 0 <= token < limit)
        raise bad_request(
            f"{field}: token id {wrong} is out of vocabulary: it is not in 0..{limit - 1}", field, "invalid_value"
        )


def truncated(token_ids: list[int], wanted: int | None, side: str, max_tokens: int | None, limit: int) -> list[int]:
    """truncate_prompt_tokens: keep so many tokens, -1 as many as leave room for max_tokens; side: what is cut off."""
    if wanted is None:
        return token_ids
    if wanted < -1 or wanted == 0 or wanted > limit:
        field = "truncate_prompt_tokens"
        raise bad_request(f"{field} must be -1 or 1..{limit}, got {wanted}", field)
    keep = wanted if wanted > 0 else max(1, limit - (max_tokens or 1))
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def split_prompt(
    prompt: str | list[str | int | list[int]] | None, max_prompts: int
) -> tuple[list[str] | None, list[list[int]]]:
    """A prompt is a text, texts, token ids or lists of token ids. Returns (texts, []) or (None, token ids)."""
    if not prompt:
        raise _bad_prompt("must not be empty")
    if isinstance(prompt, str):
        return [prompt], []
    if all(isinstance(item, int) for item in prompt):
        return None, [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > max_prompts:
        raise _bad_prompt(f"may hold at most {max_prompts} prompts, got {len(prompt)}")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return texts, []
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt):
        raise _bad_prompt("must be a text, texts, token ids or lists of token ids, not a mixture")
    if not all(lists):
        raise _bad_prompt("must not hold an empty list of token ids")
    return None, lists


def _num_tokens(prompts: Prompts) -> int:
    return sum(len(unpack(token_ids)) for token_ids in prompts.token_ids or ())


def _bad_prompt(message: str) -> ApiError:
    return bad_request(f"prompt {message}", "prompt", "invalid_value")
