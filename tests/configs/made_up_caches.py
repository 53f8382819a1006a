"""Caches of made-up models, by what a token costs."""

from __future__ import annotations

from collections.abc import Callable

from cache.spec import CacheGroup, CacheSpec, Field


def numbers_per_token(plain: int, in_fp8: int = 0) -> Callable[[str, bool], CacheSpec]:
    """Of one layer. plain: numbers in the model's dtype; in_fp8: bytes of a cache kept in 8 bits, 0: there is none."""

    def cache_spec(dtype: str, fp8: bool = False) -> CacheSpec:
        if fp8 and not in_fp8:
            raise ValueError("only latents (DeepSeek) can be kept in FP8")
        field = Field("kv", (in_fp8,), "uint8") if fp8 else Field("kv", (plain,), dtype)
        return (CacheGroup("paged", (0,), (field,)),)

    return cache_spec
