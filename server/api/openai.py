"""The bodies of requests and answers. Sources: OpenAI's API reference; vLLM's additions keep vLLM's names.

Null always means "as if absent", hence `| None = None` everywhere. Unknown fields: server/api/unknown.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from server.logs import Record

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# ---- requests -----------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """schema is followed whether `strict` or not."""

    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """format, or structures and triggers: of a structural tag."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. What is not known is refused: ignoring it would change what the answer means."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    backend: str | None = msgspec.field(default=None, name="_backend")
    disable_fallback: bool | None = None  # there is no other back end to fall back to


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both generating endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    # vLLM's, and transformers' names of what vLLM lacks.
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None  # the text of such a part


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """What the answer is expected to be: a text, or parts of one."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    prediction: Prediction | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Refused, as above.
    functions: Any = None
    chat_template: str | None = None


class BatchChatRequest(ChatRequest, kw_only=True):
    """vLLM's: a list of conversations, and one choice for each."""

    messages: list[list[ChatMessage]]  # type: ignore[assignment]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`prompt` or `messages`, the latter with what else becomes part of a chat request's prompt. add_special_tokens:
    true for a prompt, false for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None  # refused, as in a chat request


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class ResizeRequest(msgspec.Struct):
    """How many ranks shall serve."""

    count: int


class AbortRequest(msgspec.Struct, kw_only=True):
    request_ids: list[str]


# ---- answers ------------------------------------------------------------------------------------------------------

JsonDict = dict[str, Any]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """OpenAI counts tokens of the request's prediction; here drafts of every source count."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # neither where the server is to leave them out
    completion_tokens_details: CompletionTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.completion_tokens_details is None else self.completion_tokens_details.reasoning_tokens


def usage_of(record: Record) -> Usage:
    prompt, output = record.prompt_tokens, record.output_tokens
    drafts = CompletionTokensDetails(record.accepted_drafts, record.rejected_drafts, record.reasoning_tokens)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(record.cached_tokens), drafts)


class CompletionLogprobs(msgspec.Struct):
    """Lists of one length: a position each. None: the first token of the prompt, which nothing predicts."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[JsonDict | None] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """What is always null is there for clients that look for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobs]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    """reasoning is vLLM's name, reasoning_content that of DeepSeek's API and of older vLLMs: clients read one or the
    other, also where there is none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[JsonDict | None] | None = None


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moesaic"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[JsonDict] = []


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str
