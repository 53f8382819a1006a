"""`propertyNames`, which back ends do not follow, in the words that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ANNOTATIONS = frozenset(("title", "description", "$comment", "examples", "default", "deprecated"))


def names_as_properties(schema: dict[str, Any], found: Callable[[object], object]) -> None:
    """In place: names that are constants become properties, those of a pattern or a length patternProperties; other
    properties there may not be. What else propertyNames may say is left, to be refused. found: what a reference
    means."""
    names, rest = found(schema.get("propertyNames")), schema.get("additionalProperties", True)
    own = schema.get("properties", {})
    if not isinstance(names, dict) or not isinstance(own, dict) or "patternProperties" in schema:
        return
    said = names.keys() - _ANNOTATIONS
    if names.get("type", "string") == "string":
        said -= {"type"}
    changed: dict[str, Any] = {}
    if said in ({"enum"}, {"const"}):
        values = names["enum"] if "enum" in names else [names["const"]]
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        if texts and own.keys() <= set(texts):
            changed = {"properties": own if rest is False else dict.fromkeys(texts, rest) | own}
    elif said == {"pattern"} and not own:
        changed = {"patternProperties": {names["pattern"]: rest}}
    elif said and said <= {"minLength", "maxLength"} and not own:
        least, most = names.get("minLength", 0), names.get("maxLength")
        if type(least) is int and (most is None or type(most) is int):
            changed = {"patternProperties": {rf"^(.|\n){{{least},{'' if most is None else most}}}$": rest}}
    if changed:
        del schema["propertyNames"]
        schema.update(changed, additionalProperties=False)
