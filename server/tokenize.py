"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.chat import render_messages
from server.errors import bad_request
from server.openai import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from server.params import either
from server.service import Service, json_response

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokenization:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, _tokenize_decoder)
        service.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "invalid_value")
        if body.messages is None:
            (token_ids,) = await service.encode([body.prompt or ""], either(body.add_special_tokens, True))
        else:
            if not body.messages:
                raise bad_request("messages must not be empty", "messages")
            text = render_messages(
                service,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                kwargs=body.chat_template_kwargs or {},
            )
            (token_ids,) = await service.encode([text], either(body.add_special_tokens, False), "messages")
        answer = Tokenized(
            count=len(token_ids),
            max_model_len=service.plan.max_model_len,
            tokens=token_ids,
            token_strs=[service.tokenizer.token_str(token) for token in token_ids] if body.return_token_strs else None,
        )
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, _detokenize_decoder)
        service.model_name(body.model)
        service.check_token_ids(body.tokens, "tokens")
        return json_response(Detokenized(service.tokenizer.decode(body.tokens, skip_special_tokens=False)))
