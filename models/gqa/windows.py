"""Which layers look back a window of tokens only, as config.json says. Free of torch.

Defaults are those of Hugging Face transformers: each rule below is that of a config class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from models.fields import Fields


class Windows(NamedTuple):
    """size: tokens that a query sees, its own included; 0: there are no such layers."""

    size: int
    layers: tuple[int, ...]


ReadWindows = Callable[[Fields, int], Windows]
NO_WINDOWS = Windows(0, ())
_TYPES = ("full_attention", "sliding_attention")


def no_windows(fields: Fields, num_layers: int) -> Windows:
    """Families without; a layer_types that says otherwise is refused."""
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or set(layer_types) - {"full_attention"}):
        raise fields.error("layer_types", 'a list of "full_attention" (this family has no other attention)')
    return NO_WINDOWS


def everywhere(default: int | None) -> ReadWindows:
    """Mistral, Mixtral: every layer, if there is a sliding_window. default: where the field is absent."""

    def read(fields: Fields, num_layers: int) -> Windows:
        no_windows(fields, num_layers)
        size = fields.raw.get("sliding_window", default)
        return NO_WINDOWS if size is None else Windows(fields.integer("sliding_window", size), tuple(range(num_layers)))

    return read


def qwen3_moe(fields: Fields, num_layers: int) -> Windows:
    """Every layer, if use_sliding_window says so."""
    if not fields.flag("use_sliding_window", False):
        return no_windows(fields, num_layers)
    return everywhere(4096)(fields, num_layers)


def qwen(fields: Fields, num_layers: int) -> Windows:
    """Qwen2 and Qwen3: the layers from max_window_layers on, if use_sliding_window says so."""
    if not fields.flag("use_sliding_window", False):
        return no_windows(fields, num_layers)
    return dots(fields, num_layers)


def dots(fields: Fields, num_layers: int) -> Windows:
    """dots1: the layers from max_window_layers on, if there is a sliding_window."""
    first = fields.integer("max_window_layers", 62 if _is(fields, "Dots1") else 28, minimum=0)
    return _some(fields, num_layers, lambda layer: layer >= first, 4096)


def qwen2_moe(fields: Fields, num_layers: int) -> Windows:
    """Every other layer before max_window_layers, if use_sliding_window says so."""
    if not fields.flag("use_sliding_window", False):
        return no_windows(fields, num_layers)
    last = fields.integer("max_window_layers", 28, minimum=0)
    return _some(fields, num_layers, lambda layer: layer % 2 == 0 and layer < last, 4096)


def gpt_oss(fields: Fields, num_layers: int) -> Windows:
    """Every other layer, the first among them."""
    return _some(fields, num_layers, lambda layer: layer % 2 == 0, 128)


def _some(fields: Fields, num_layers: int, slides: Callable[[int], bool], default: int) -> Windows:
    """layer_types where it is there, else the rule."""
    if "sliding_window" in fields.raw and fields.raw["sliding_window"] is None:
        return no_windows(fields, num_layers)
    layers = tuple(layer for layer in range(num_layers) if slides(layer))
    types = fields.raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not all(kind in _TYPES for kind in types):
            raise fields.error("layer_types", f"a list of {num_layers} times {' or '.join(_TYPES)}")
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    return Windows(fields.integer("sliding_window", default), layers) if layers else NO_WINDOWS


def _is(fields: Fields, name: str) -> bool:
    return fields.first_of("architectures").startswith(name)
