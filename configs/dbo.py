"""Dual-batch overlap: what was asked for and what was decided (docs/dbo.md). Without torch."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

DboMode = Literal["auto", "on", "off"]
DBO_MODES: tuple[DboMode, ...] = get_args(DboMode)

MAX_PARTS = 8
# vLLM's defaults, taken when steps are to be split and no option says from how many tokens on.
DECODE_TOKENS, PREFILL_TOKENS = 32, 512


class DboPlan(Struct, frozen=True, kw_only=True):
    """Steps may be split in `num_ubatches`. From how many tokens of a rank on that pays: decode_tokens in a step of
    decodes alone, prefill_tokens in any other; None: it is measured when no rank has work, and remembered in
    `memory`."""

    num_ubatches: int = 2
    decode_tokens: int | None = None
    prefill_tokens: int | None = None
    memory: str = ""


def plan_dbo(
    mode: DboMode,
    num_ubatches: int,
    decode_tokens: int | None,
    prefill_tokens: int | None,
    num_experts: int,
    num_ranks: int,
    why: dict[str, str],
) -> DboPlan | None:
    """None: no step is split. Notes the reason in `why`. ValueError names the field and the limit.

    A wish that has no meaning for this model is no error: launch scripts carry it from one to the next.
    """
    if not 2 <= num_ubatches <= MAX_PARTS:
        raise ValueError(f"ubatch_size must be 2 to {MAX_PARTS}, not {num_ubatches}")
    for name, value in (
        ("dbo_decode_token_threshold", decode_tokens),
        ("dbo_prefill_token_threshold", prefill_tokens),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not num_experts:
        why["dbo"] = f"a dense model exchanges nothing{' (--enable-dbo on is ignored)' if mode == 'on' else ''}"
        return None
    if mode == "off":
        why["dbo"] = "as asked"
        return None
    if mode == "on":
        why["dbo"] = "as asked"
        decode_tokens = DECODE_TOKENS if decode_tokens is None else decode_tokens
        prefill_tokens = PREFILL_TOKENS if prefill_tokens is None else prefill_tokens
        return DboPlan(num_ubatches=num_ubatches, decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)
    if num_ranks == 1:
        why["dbo"] = "one rank exchanges nothing"
        return None
    measured = decode_tokens is None or prefill_tokens is None
    why["dbo"] = "where it pays, as measured when no rank has work" if measured else "from as many tokens as asked"
    return DboPlan(num_ubatches=num_ubatches, decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)
