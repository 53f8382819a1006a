"""Speculation: what was asked for, and what was decided (docs/speculation.md). Without torch."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from msgspec import Struct, structs

Method = Literal["prediction", "ngram", "suffix", "mtp", "eagle3"]
METHODS: tuple[Method, ...] = get_args(Method)

NONE = "none"
MAX_TOKENS = 16  # drafts of a request in a step: each takes a row of every step's memory
MAX_STEP_TOKENS = 256  # of all requests of a rank: with so many sequences drafts are not worth their while
MAX_LOOKUP = 64
DEFAULT_TOKENS = {"prediction": 7, "ngram": 5, "suffix": 7, "mtp": 4, "eagle3": 4}
DEFAULT_LOOKUP = 5  # vLLM's
DECIDED = ("memory", "whole")
_SPLIT = "draft_tensor_parallel_size"  # vLLM's; every rank has all of a drafter


class SpeculativeConfig(Struct, frozen=True, kw_only=True):
    """Names are those of vLLM's --speculative-config.

    method: where drafts come from, besides the predictions that requests bring; "prediction": from nowhere else.
    model: the directory, or the name on the hub, of what drafts ("eagle3", which it implies).
    num_speculative_tokens: most of a request in a step; fewer where that is measured to be faster, if adaptive.
    prompt_lookup_min, _max: tokens that have to occur again ("ngram"). suffix_decoding_*: see
    engine/speculation/suffix.py. memory: file of the times that were measured; "": they are not kept. whole: every
    rank has all experts of the layer that drafts (method "mtp"). The last two are decided, not asked for.
    """

    method: Method
    num_speculative_tokens: int
    model: str = ""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adaptive: bool = True
    memory: str = ""
    whole: bool = False

    @property
    def model_drafts(self) -> bool:
        """A layer makes the drafts, at the end of a step."""
        return self.method in ("mtp", "eagle3")

    def most_drafts(self, max_num_seqs: int) -> int:
        """Of a rank in a step."""
        return min(self.num_speculative_tokens * max_num_seqs, MAX_STEP_TOKENS)


def parse_speculative_config(values: dict[str, Any], where: str = "speculative_config") -> SpeculativeConfig | None:
    """None: no drafts, as `{"method": "none"}` asks for. ValueError on one line that names the field and its limits."""
    names = [field.name for field in structs.fields(SpeculativeConfig) if field.name not in DECIDED] + [_SPLIT]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r:.100}; the fields are {', '.join(names)}")
    method = values.get("method", "eagle3" if values.get("model") else None)
    if isinstance(method, str) and method.endswith("_mtp"):  # what vLLM called it for each family
        method = "mtp"
    if method not in (*METHODS, NONE):
        raise ValueError(f"{where}: method must be one of {', '.join(METHODS)}, {NONE}, not {method!r:.100}")
    _check_integer(where, values, _SPLIT, 1, 1)
    given = {name: value for name, value in values.items() if name != _SPLIT} | {"method": method}
    model = given.get("model", "")
    if not isinstance(model, str) or bool(model) != (method == "eagle3"):
        raise ValueError(f"{where}: model must be the directory of the drafter of method eagle3, not {model!r:.100}")
    _check_integer(where, given, "num_speculative_tokens", 1, MAX_TOKENS)
    _check_integer(where, given, "prompt_lookup_min", 1, MAX_LOOKUP)
    _check_integer(where, given, "prompt_lookup_max", 1, MAX_LOOKUP)
    _check_integer(where, given, "suffix_decoding_max_tree_depth", 2, 256)
    _check_integer(where, given, "suffix_decoding_max_cached_requests", 0, 1 << 20)
    _check_number(where, given, "suffix_decoding_max_spec_factor", 0.0, 100.0)
    _check_number(where, given, "suffix_decoding_min_token_prob", 0.0, 1.0)
    if type(given.get("adaptive", True)) is not bool:
        raise ValueError(f"{where}: adaptive must be true or false, not {given['adaptive']!r:.100}")
    if method == NONE:
        return None
    lookup = [given.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max")]
    least, most = lookup[0] or lookup[1] or DEFAULT_LOOKUP, lookup[1] or lookup[0] or DEFAULT_LOOKUP
    if least > most:
        raise ValueError(f"{where}: prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})")
    given |= {"prompt_lookup_min": least, "prompt_lookup_max": most}
    given.setdefault("num_speculative_tokens", DEFAULT_TOKENS[given["method"]])
    return SpeculativeConfig(**given)


def _check_integer(where: str, values: dict[str, Any], name: str, least: int, most: int) -> None:
    value = values.get(name, least)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where}: {name} must be an integer from {least} to {most}, not {value!r:.100}")


def _check_number(where: str, values: dict[str, Any], name: str, least: float, most: float) -> None:
    value = values.get(name, least)
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise ValueError(f"{where}: {name} must be a number from {least:g} to {most:g}, not {value!r:.100}")
