"""The sampling that a model's makers recommend: generation_config.json. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from front.params import SamplingParams
from front.sampling_params import validate


class _Recommended(msgspec.Struct):
    """Only what changes how tokens are drawn; how long an answer may be is the caller's business."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_OVERRIDES = (*_Recommended.__struct_fields__, "presence_penalty", "frequency_penalty")


def overrides_of(values: dict[str, Any], where: str) -> dict[str, float]:
    """Defaults that an operator gives. ValueError names the field; where: what errors call the values."""
    for name, value in values.items():
        if name not in _OVERRIDES:
            raise ValueError(f"{where}: {name!r:.100} is no default of sampling; they are {', '.join(_OVERRIDES)}")
        if type(value) not in (int, float):
            raise ValueError(f"{where}: {name} must be a number, not {value!r:.100}")
    try:
        validate(msgspec.structs.replace(SamplingParams(), **values), vocab_size=1, max_logprobs=0)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return dict(values)


def model_defaults(model_dir: str | Path) -> SamplingParams:
    """SamplingParams() with what generation_config.json says in place of its defaults. No such file: nothing is
    replaced. ValueError names the file and the field when it does not hold what it should."""
    path = Path(model_dir) / "generation_config.json"
    try:
        recommended = msgspec.json.decode(path.read_bytes(), type=_Recommended)
    except FileNotFoundError:
        return SamplingParams()
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    given = {name: value for name, value in msgspec.structs.asdict(recommended).items() if value is not None}
    defaults = msgspec.structs.replace(SamplingParams(), **given)
    try:
        validate(defaults, vocab_size=1, max_logprobs=0)  # it holds nothing that depends on these
    except ValueError as error:  # otherwise every request would be refused for what it has not said
        raise ValueError(f"{path}: {error}") from None
    return defaults
