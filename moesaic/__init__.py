"""Moesaic: an inference engine for mixture-of-experts language models.

    from moesaic import LLM, SamplingParams
    with LLM("path/to/model") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

The names below are all that is public. They are imported when first used, so that `import moesaic` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moesaic.rooms import check_own_rooms, no_collections

if TYPE_CHECKING:
    from configs.engine import EngineConfig
    from configs.eplb import EplbConfig
    from configs.versions import __version__
    from front.outputs import CompletionOutput, RequestOutput
    from front.params import SamplingParams, StructuredOutputsParams
    from front.search.beams import BeamSearchOutput, BeamSearchParams
    from moesaic.async_llm import AsyncLLM
    from moesaic.llm import LLM

__all__ = [
    "LLM", "AsyncLLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "EngineConfig", "EplbConfig",
    "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "__version__",
]  # fmt: skip

_HOMES = {
    "LLM": "moesaic.llm",
    "AsyncLLM": "moesaic.async_llm",
    "EngineConfig": "configs.engine",
    "EplbConfig": "configs.eplb",
    "SamplingParams": "front.params",
    "StructuredOutputsParams": "front.params",
    "BeamSearchOutput": "front.search.beams",
    "BeamSearchParams": "front.search.beams",
    "RequestOutput": "front.outputs",
    "CompletionOutput": "front.outputs",
    "__version__": "configs.versions",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    check_own_rooms()
    with no_collections():
        return getattr(importlib.import_module(_HOMES[name]), name)
