"""From a checkpoint's config.json to its model family.

Reading a config must not import torch (the front and the command line do it), so the module of a family's model is
named here and imported by `build`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from models.deepseek import config as deepseek
from models.eagle3.config import SECTION, with_drafter
from models.facts import ModelFacts
from models.fields import ConfigError, Fields
from models.gqa import config as gqa
from models.gqa.families import ARCHITECTURES as GQA_ARCHITECTURES
from models.kimi_linear import config as kimi_linear
from models.quantization import check_modelopt
from models.qwen3_next import config as qwen3_next

if TYPE_CHECKING:
    import torch

    from ep.parallel import Parallel
    from models.base import CausalLM

MlaPrefill = Literal["auto", "naive", "absorbed"]
_BESIDE_TEXT = (
    "quantization_config",
    "tie_word_embeddings",
    SECTION,
)  # of a model with vision, and of its text as well
_ROPE_NAMES = {"rope_scaling", "rope_parameters"}


class Family(Struct, frozen=True):
    """parse: the config reader. model: class `name` of `module`, called with (config, parallel, dtype, device); of
    models with latent attention with mla_prefill, mla_backend and fp8_cache too."""

    parse: Callable[[dict[str, Any], str], ModelFacts]
    module: str
    name: str


_GQA = Family(gqa.parse, "models.gqa.model", "GqaForCausalLM")
_DEEPSEEK = Family(deepseek.parse, "models.deepseek.model", "DeepseekForCausalLM")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(GQA_ARCHITECTURES, _GQA),
    **dict.fromkeys(deepseek.ARCHITECTURES, _DEEPSEEK),
    **dict.fromkeys(
        kimi_linear.ARCHITECTURES, Family(kimi_linear.parse, "models.kimi_linear.model", "KimiLinearForCausalLM")
    ),
    **dict.fromkeys(
        qwen3_next.ARCHITECTURES, Family(qwen3_next.parse, "models.qwen3_next.model", "Qwen3NextForCausalLM")
    ),
}
# Models with vision: what their text_config describes is served, by the architecture that it is.
WRAPPERS = {
    "KimiK25ForConditionalGeneration": "KimiK2ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK2ForCausalLM",  # by which transformers calls it
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelFacts:
    """Parse config.json of a Hugging Face directory. Does not import torch. overrides: fields that replace those of the
    file.

    Raises ConfigError: one line that names the file and, where there is one, the field.
    """
    fields = read_fields(Path(path), overrides or {})
    return parse_config(fields.raw, fields.source)


def read_fields(directory: Path, overrides: Mapping[str, Any]) -> Fields:
    """The fields that `parse_config` takes. ConfigError also for weights that a file beside config.json tells of."""
    fields = Fields.from_file(directory / "config.json")
    check_modelopt(fields, directory)
    return Fields(overridden(fields.raw, overrides), fields.source)


def overridden(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Whole fields are replaced. rope_scaling and rope_parameters are two names of one field."""
    given = _ROPE_NAMES & overrides.keys()
    return {name: value for name, value in raw.items() if not (given and name in _ROPE_NAMES)} | dict(overrides)


def parse_config(raw: dict[str, Any], source: str) -> ModelFacts:
    """The same of the fields themselves; source: what errors name."""
    fields = Fields(raw, source)
    architecture = fields.first_of("architectures")
    if architecture in WRAPPERS:
        return parse_config(text_part(raw, source), source)
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(sorted({*FAMILIES, *WRAPPERS}))
        raise ConfigError(f"{fields.source}: architectures: {architecture} is not supported (these are: {known})")
    return with_drafter(family.parse(fields.raw, fields.source), fields)


def text_part(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of the language model: all of them, or those inside a model with vision."""
    fields = Fields(raw, source)
    architecture = WRAPPERS.get(fields.first_of("architectures"))
    if architecture is None:
        return raw
    text = fields.section("text_config").raw
    beside = {name: raw[name] for name in _BESIDE_TEXT if fields.has(name) and name not in text}
    return {**beside, **text, "architectures": [architecture], deepseek.WRAPPED: True}


def build(
    config: ModelFacts,
    parallel: Parallel,
    dtype: torch.dtype,
    device: torch.device,
    mla_prefill: MlaPrefill = "auto",
    mla_backend: str = "auto",
    fp8_cache: bool = False,
) -> CausalLM:
    """The model that `read_config` described, with uninitialised weights: call its `load` next. mla_backend: a name of
    mla/backend.py; fp8_cache: the cache is kept in FP8. Raises ValueError where that cannot be."""
    choices: dict[str, Any] = {}
    if config.mla_dims is not None:
        choices = {"mla_prefill": mla_prefill, "mla_backend": mla_backend, "fp8_cache": fp8_cache}
    elif fp8_cache:
        raise ValueError(
            f"kv_cache_dtype fp8: {config.architecture} has no latent cache, which is what there is in FP8"
        )
    model: CausalLM = model_class(config.architecture)(config, parallel, dtype, device, **choices)
    return model


def model_class(architecture: str) -> Callable[..., Any]:
    """What makes the model; its modules are imported here."""
    family = FAMILIES[architecture]
    made: Callable[..., Any] = vars(importlib.import_module(family.module))[family.name]
    return made
