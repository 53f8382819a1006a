"""The configurations of published models (tests/models/published): the fields that say what is computed, typed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = sorted((Path(__file__).parent / "published").glob("*.json"))
_MODELS: dict[str, dict[str, Any]] = {
    name: model for file in _FILES for name, model in json.loads(file.read_text(encoding="utf-8")).items()
}
NAMES = tuple(_MODELS)


def config_of(name: str) -> dict[str, Any]:
    """like: what the model has in common with another; text: what changes in its text_config."""
    model = _MODELS[name]
    config = {**(config_of(model["like"]) if "like" in model else {}), **model.get("config", {})}
    if "text_like" in model:
        config["text_config"] = config_of(model["text_like"])
    if "text" in model:
        config["text_config"] = {**config["text_config"], **model["text"]}
    return config


def sizes_of(name: str) -> tuple[float, float]:
    """Billions of parameters, of all and of those that a token is multiplied by, as its makers say."""
    published = _MODELS[name]["published"]
    return published["total"], published["active"]
