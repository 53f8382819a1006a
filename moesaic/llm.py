"""`moesaic.LLM`: offline generation, with its ranks started for the caller.

What it needs is imported when one is made, while the process of a rank, which imports more, does so on another core: it
has been started by then. So nothing of the engine is imported with this file, and what the class does is in
front/llm.py.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Self

from launch.early import take_source
from moesaic.rooms import no_collections

if TYPE_CHECKING:
    from configs.engine import EngineConfig, Plan
    from front.llm import LLM as Methods
    from moesaic.opened import Opened
else:
    Methods = object


class LLM(Methods):
    """Offline generation: generate, chat, beam_search and the rest of front.llm.LLM. Every rank is a process of its
    own; one may also run in this process (`in_process`).

        with LLM("path/to/model", data_parallel_size=2) as llm:
            results = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ValueError, one line that names the file or the field, for what cannot run.
    """

    plan: Plan

    def __init__(
        self,
        model: str | None = None,
        *,
        in_process: bool | None = None,
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        """model: a Hugging Face directory; None: the embedded model. options: fields of EngineConfig, such as
        data_parallel_size=4, enable_eplb=True, eplb=EplbConfig(window_size=200); vLLM's keyword arguments are taken
        where what they ask for is so anyway, and refused with a sentence where it cannot be.

        generation_config: where the parameters come from of calls that bring none: "auto": the model's
        generation_config.json; "vllm": SamplingParams().

        in_process: the one rank computes in this process, which imports torch for it: then a debugger, a profiler or
        hooks of torch reach the model. None: where torch has been imported already, or there are logits processors,
        which may be classes of this script, or there is a GPU. A process of its own is ready sooner, as it imports
        beside this one, and less; and it is started again if it is lost."""
        self._hold(_opened({"model": model, **options}, in_process, generation_config))

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, in_process: bool | None = None, generation_config: str = "auto"
    ) -> Self:
        self = cls.__new__(cls)
        self._hold(_opened(config, in_process, generation_config))
        return self

    def _hold(self, opened: Opened) -> None:
        self.plan, self._llm, self._weights = opened

    def __getattr__(self, name: str) -> Any:
        """What front.llm.LLM has besides."""
        if name.startswith("_"):  # nor is there a `_llm` before it has been opened
            raise AttributeError(f"LLM has no {name}")
        return getattr(self._llm, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self._llm) if not name.startswith("_"))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the ranks. May be called again."""
        self._llm.close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None


def _opened(asked: EngineConfig | dict[str, Any], in_process: bool | None, generation_config: str) -> Opened:
    """asked: a configuration, or fields of one."""
    source = None if in_process or "torch" in sys.modules else take_source()
    try:
        with no_collections():
            engine = importlib.import_module("moesaic.opened")
        config = engine.config_of(asked) if isinstance(asked, dict) else asked
        opened: Opened = engine.open_engine(config, in_process, generation_config, source)
    except BaseException:
        if source is not None:
            source.drop()
        raise
    return opened
