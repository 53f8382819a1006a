"""Whole outputs as messages, for callers without HTTP: content, reasoning and calls of tools."""

from __future__ import annotations

from front.chat.events import Message
from front.chat.format import OutputFormat
from front.outputs import CompletionOutput, RequestOutput
from front.params import SamplingParams
from front.text.tokenizer import Tokenizer


def read_messages(tokenizer: Tokenizer, format: OutputFormat, params: SamplingParams, result: RequestOutput) -> None:
    """Sets `message` of every output."""
    for output in result.outputs:
        text = _text(tokenizer, format, params, result.prompt_token_ids, output)
        parser = format.parser(result.request_id, output.index)
        output.message = Message()
        output.message.add(parser.feed(text))
        output.message.add(parser.finish(cut=output.finish_reason != "stop"))


def _text(
    tokenizer: Tokenizer, format: OutputFormat, params: SamplingParams, prompt: list[int], output: CompletionOutput
) -> str:
    """As the parser is to see it: with special tokens that are part of tags, without what ended it."""
    token_ids, stop = output.token_ids, output.stop_reason
    if output.finish_reason == "stop" and not isinstance(stop, str) and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens, format.tags)
    text = detokenizer.push(token_ids) + detokenizer.finish()
    if isinstance(stop, str):
        before, found, _ = text.partition(stop)
        return before + found if params.include_stop_str_in_output else before
    return text
