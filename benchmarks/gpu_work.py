"""The cases of kernels that the parts of gpu_check.py run, and that gpu_compile.py therefore compiles before they do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_cases import MODELS, Case, Shape, all_cases, attention_cases, expert_cases, mla_cases, padded_cases, row_cases

SMALL = Shape("tiny", 128, 128, 4, 4, 2, 4, 2, 128, 300)
DEEPSEEK, QWEN = MODELS["deepseek-v3"], MODELS["qwen3-30b-a3b"]
TUNED_TOKENS = (64, 512, 16, 4096, 1)  # the most telling first


def check_cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Part `kernels`."""
    if not tiny:
        yield from all_cases(device, list(MODELS))
        return
    yield from expert_cases(SMALL, device, (3,))
    yield from row_cases(SMALL, device, (3,))


def padded(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Part `padded`: what a decode step of 16 ranks gives to the experts of one of them."""
    if tiny:
        yield from padded_cases(SMALL, device, 4, 16, (2,))
        return
    yield from padded_cases(DEEPSEEK, device, 18, 4096, (16, 64))
    yield from padded_cases(QWEN, device, 16, 2048, (16,))


def tune_cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Part `tune`, in the order of what they are worth: a table keeps what was found when the time is over."""
    if tiny:
        yield from expert_cases(SMALL, device, (3,), (False,))
        return
    yield from expert_cases(DEEPSEEK, device, TUNED_TOKENS, (True,))
    yield from mla_cases(DEEPSEEK, device, [(32, 4096)], [])
    yield from expert_cases(QWEN, device, TUNED_TOKENS, (False,))
    yield from attention_cases(QWEN, device, [(32, 4096)], [])
    yield from mla_cases(DEEPSEEK, device, [], [(1, 2048, 2048)])
    yield from attention_cases(QWEN, device, [], [(1, 2048, 2048)])
    yield from expert_cases(DEEPSEEK, device, TUNED_TOKENS, (False,))
    yield from expert_cases(QWEN, device, TUNED_TOKENS, (True,))
