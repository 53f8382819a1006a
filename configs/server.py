"""What the HTTP server was asked to be. Without torch."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

# vLLM's names of what follows grammars: the first three are llguidance.
STRUCTURED_BACKENDS = ("auto", "guidance", "llguidance", "xgrammar")


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. Keys are SHA-256 hex digests, so that no key stands in a file or a log."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # the path of a Unix domain socket, in the place of host and port
    api_key_digests: tuple[str, ...] = ()  # none: no key is asked
    admin_key_digests: tuple[str, ...] = ()  # none: admin routes answer 403
    root_path: str = ""  # before every route, where a proxy leaves it there; "" or "/name"
    ssl_certfile: str | None = None  # with ssl_keyfile: HTTPS
    ssl_keyfile: str | None = None
    chat_template_kwargs: dict[str, Any] = {}  # unless a request sets them
    generation: dict[str, float] = {}  # defaults of sampling, before all others
    chat_template: str | None = None  # text of a template that replaces the model's
    content_parts: bool = False  # templates get a message's content as a list of parts, not as one text
    tool_call_parser: str | None = (
        None  # a family of front/chat/families.py; None: what the chat template says; "": none
    )
    reasoning_parser: str | None = None  # the same
    structured_outputs_backend: str = "auto"  # of requests that name none
    enable_auto_tool_choice: bool = True  # false: calls only where a request requires them
    exclude_tools_when_tool_choice_none: bool = False  # the template is not told of tools that may not be called
    enable_force_include_usage: bool = False  # streams end with the usage whether a request asks for it or not
    enable_prompt_tokens_details: bool = True  # usage says which tokens were cached, drafts, reasoning
    return_tokens_as_token_ids: bool = False  # tokens of logprobs as "token_id:N", unless a request says otherwise
    use_generation_config: bool = True  # defaults of sampling from the model's generation_config.json
    max_body_bytes: int = 8 << 20
    max_inflight_bytes: int = 256 << 20  # bodies of all requests in flight together; beyond it: 503 with Retry-After
    max_header_bytes: int = 64 << 10
    max_prompts: int = 1024  # prompts in one completion request
    max_n: int = 128
    max_stop: int = 16
    max_queued_requests: int = 4096  # beyond it: 503 with Retry-After
    max_stored_responses: int = 1000  # of /v1/responses that are kept; 0: none
    max_stored_bytes: int = 64 << 20
    shutdown_timeout: float = 30.0  # SIGTERM: running requests may finish within this
    keep_alive_interval: float = 15.0  # an SSE comment while nothing else is sent; 0: never
    request_timeout: float = 0.0  # 0: none
    allowed_origins: tuple[str, ...] = ()  # CORS; none: closed
    eplb_record_dir: str | None = None  # where loads may be recorded; None: nowhere
    profile_dir: str | None = None  # where profiles may be written (POST /start_profile); None: nowhere
    otlp_traces_endpoint: str | None = None  # of an OpenTelemetry collector; None: no traces
    log_format: str = "text"  # or "json"
    log_requests: bool = True  # one line per finished request; prompts are never logged

    def __post_init__(self) -> None:
        """ValueError naming the field and its limit."""
        if self.structured_outputs_backend not in STRUCTURED_BACKENDS:
            raise ValueError(
                f"structured_outputs_config: backend must be one of {', '.join(STRUCTURED_BACKENDS)}, "
                f"not {self.structured_outputs_backend!r:.100}"
            )
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_inflight_bytes must be at least max_request_bytes ({self.max_body_bytes}), or the largest body "
                f"could never be taken; it is {self.max_inflight_bytes}"
            )
