"""What is decided about the kernels' data: how the cache is kept. Standard library only; `resolve` calls it."""

from __future__ import annotations

from typing import Literal

KvCacheDtype = Literal["auto", "fp8"]


def kept_cache(
    asked: KvCacheDtype, architecture: str, numbers_per_token: int, fp8_bytes_per_token: int, item_size: int
) -> tuple[int, str]:
    """(numbers of item_size bytes that a token takes in the cache, why). fp8_bytes_per_token: 0 where a model has no such cache;
    else a multiple of 4.

    Raises ValueError where the cache cannot be what was asked for.
    """
    if asked == "auto":
        return numbers_per_token, "the dtype of the model"
    if not fp8_bytes_per_token:
        raise ValueError(f"kv_cache_dtype {asked}: only latents (DeepSeek) can be kept in FP8, {architecture} has none")
    return fp8_bytes_per_token // item_size, "as asked; rotated keys stay in bfloat16"
