"""Schemas and instances by chance, and tokenizers that cut JSON at other places. The judge of an instance is PyPI's
jsonschema, which shares nothing with the grammars."""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = ["a", "bc", "name", "x y", "ü", "🎉🎉", "0", "true", "null", "{}", 'say "hi"', "back\\slash", "tab\there", ""]
PLAIN = ["a", "bc", "name", "zz", "q9", "7", ""]
PATTERNS = {
    "^[a-z]+$": ["a", "abc"], "^[A-Z][a-z]*$": ["A", "Bob"], r"^\d{2,4}$": ["12", "1234"], "^(on|off)$": ["on", "off"],
    "^a.c$": ["abc", "a-c"], r"^v\d+(\.\d+)?$": ["v1", "v2.0"], "^$": [""], "b": ["b", "abc"], "^[^a]*$": ["bcd", ""],
    r"^[\w.]+@[\w.]+$": ["a@b.c", "x_1@y"], "^(ab)+$": ["ab", "abab"], "^x|y$": ["xa", "ay"],
}  # fmt: skip
FORMATS = {
    "date": "2026-11-22", "time": "20:30:00Z", "date-time": "2026-11-22T20:30:00Z", "email": "a@b.de", "ipv4": "10.0.0.1",
    "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv6": "::1", "hostname": "a.example", "duration": "P1DT2H",
}  # fmt: skip
NAMES = ["id", "name", "kind", "a b", "é", "value", "list", "next", "type", "$ref", "properties", "0"]
VALUES = [0, 1, -7, 3.5, "", "x", None, True, False, [], [1], {}, {"z": 1}, "5", 1000, [[]], "abcdefghijkl"]


def make_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """The keywords that the grammars follow, nested at most so deep; $defs at the top."""
    defs = {f"d{i}": _schema(random, depth - 1, 0) for i in range(random.randrange(3))}
    schema = _schema(random, depth, len(defs))
    return (
        {**schema, "$defs": defs}
        if defs and "$ref" not in schema
        else schema
        if not defs
        else {"allOf": [schema], "$defs": defs}
    )


def _schema(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    simple = [_string, _integer, _number, _choice, _types]
    nested = [_array, _tuple, _object, _object, _open_object, _any, _tagged, _all]
    if num_defs and random.random() < 0.2:
        return {"$ref": f"#/$defs/d{random.randrange(num_defs)}"}
    maker = random.choice(simple if depth <= 0 or random.random() < 0.3 else nested)
    return maker(random, depth - 1, num_defs)


def _string(random: Random, _: int, __: int) -> dict[str, Any]:
    kind = random.randrange(5)
    if kind == 0:
        return {"type": "string", "pattern": random.choice(list(PATTERNS))}
    if kind == 1:
        return {"type": "string", "format": random.choice(list(FORMATS))}
    low = random.randrange(4)
    limits = {"minLength": low, "maxLength": low + random.randrange(5)}
    return {"type": "string", **{k: v for k, v in limits.items() if random.random() < 0.6}}


def _integer(random: Random, _: int, __: int) -> dict[str, Any]:
    low = random.randrange(-120, 120)
    high = low + random.choice([1, 2, 9, 10, 99, 1000])
    schema: dict[str, Any] = {"type": "integer"}
    if random.random() < 0.7:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = low
    if random.random() < 0.7:
        schema[random.choice(["maximum", "exclusiveMaximum"])] = high + 1
    if len(schema) == 1 and random.random() < 0.5:
        schema["multipleOf"] = random.choice([2, 3, 5, 10])
    return schema


def _number(random: Random, _: int, __: int) -> dict[str, Any]:
    low = random.randrange(-50, 50) / random.choice([1, 2, 10])
    schema: dict[str, Any] = {"type": "number"}
    if random.random() < 0.7:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = low
    if random.random() < 0.7:
        schema[random.choice(["maximum", "exclusiveMaximum"])] = low + random.choice([1, 2, 10, 100])
    return schema


def _choice(random: Random, _: int, __: int) -> dict[str, Any]:
    return {"const": random.choice(VALUES)} if random.random() < 0.4 else {"enum": random.sample(VALUES[2:], 4)}


def _types(random: Random, _: int, __: int) -> dict[str, Any]:
    types = random.sample(["string", "integer", "boolean", "null", "array", "object"], random.randrange(1, 4))
    schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
    if "string" in types and random.random() < 0.5:
        schema["maxLength"] = 4
    if "integer" in types and random.random() < 0.5:
        schema["minimum"] = 0
    if "array" in types and random.random() < 0.5:
        schema["maxItems"] = 1
    return schema


def _array(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(random, depth, num_defs)}
    if random.random() < 0.5:
        schema["minItems"] = random.randrange(3)
    if random.random() < 0.5:
        schema["maxItems"] = 2 + random.randrange(3)
    return schema


def _tuple(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    first = [_schema(random, depth, num_defs) for _ in range(random.randrange(1, 4))]
    rest = random.choice([False, True, {"type": "integer"}])
    return {"type": "array", "prefixItems": first, "items": rest, "minItems": random.randrange(len(first) + 1)}


def _object(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(5))
    schema: dict[str, Any] = {"type": "object", "properties": {n: _schema(random, depth, num_defs) for n in names}}
    schema["required"] = [name for name in names if random.random() < 0.6]
    rest = random.choice([False, False, None, {"type": "integer"}])
    if rest is not None:
        schema["additionalProperties"] = rest
    return schema


def _open_object(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    if random.random() < 0.5:
        patterns = {"^x_": _schema(random, depth, num_defs), "^[0-9]+$": {"type": "boolean"}}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    low = random.randrange(2)
    limits = {"minProperties": low, "maxProperties": low + 1}
    own = {k: v for k, v in limits.items() if random.random() < 0.7}
    return {"type": "object", "additionalProperties": _schema(random, depth, num_defs), **own}


def _any(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth, num_defs) for _ in range(random.randrange(1, 4))]}


def _tagged(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    """One of several by the value of a property."""
    branches = []
    for tag in ("cat", "dog", "cow")[: random.randrange(1, 4)]:
        own = {"tag": {"const": tag}, "of": _schema(random, depth, num_defs)}
        branches.append({"type": "object", "properties": own, "required": ["tag"], "additionalProperties": False})
    return {random.choice(["oneOf", "anyOf"]): branches}


def _all(random: Random, depth: int, num_defs: int) -> dict[str, Any]:
    if random.random() < 0.5:
        return {"allOf": [{"type": "integer", "minimum": -3}, {"maximum": random.randrange(30)}]}
    parts = [
        {"type": "object", "properties": {n: _schema(random, depth, num_defs)}, "required": [n]} for n in ("p", "q")
    ]
    return {"allOf": parts}


def make_instance(random: Random, schema: Any, top: dict[str, Any], depth: int = 6) -> Any:
    """Likely one of the schema: as far as can be seen from here."""
    if not isinstance(schema, dict) or depth <= 0:
        return random.choice(VALUES)
    if "$ref" in schema:
        return make_instance(random, top["$defs"][schema["$ref"].rsplit("/", 1)[1]], top, depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return make_instance(random, random.choice(schema[keyword]), top, depth)
    if "allOf" in schema:
        made = [make_instance(random, one, top, depth) for one in schema["allOf"]]
        objects = [one for one in made if isinstance(one, dict)]
        if len(objects) < len(made):
            return made[0]
        named = [name for one in schema["allOf"] for name in one.get("properties", ())]
        together = {name: value for one in objects for name, value in one.items()}
        return {name: together[name] for name in [*named, *together] if name in together}
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else random.choice(schema["enum"])
    kind = schema.get("type")
    kind = random.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _an_object(random, schema, top, depth)
    if kind == "array":
        first = [make_instance(random, one, top, depth - 1) for one in schema.get("prefixItems", ())]
        fewest, most = schema.get("minItems", 0), schema.get("maxItems", 4)
        rest = random.randrange(max(0, fewest - len(first)), most + 1)
        items = schema.get("items")
        more = [] if items is False else [make_instance(random, items, top, depth - 1) for _ in range(rest)]
        return (first + more)[: max(fewest, random.randrange(most + 1))]
    return _a_simple_one(random, kind, schema)


def _an_object(random: Random, schema: dict[str, Any], top: dict[str, Any], depth: int) -> dict[str, Any]:
    made = {}
    for name, own in schema.get("properties", {}).items():
        if name in schema.get("required", ()) or random.random() < 0.5:
            made[name] = make_instance(random, own, top, depth - 1)
    for pattern, own in schema.get("patternProperties", {}).items():
        if random.random() < 0.5:
            made["x_1" if pattern == "^x_" else "42"] = make_instance(random, own, top, depth - 1)
    more = schema.get("additionalProperties")
    if more is not False:
        fewest = schema.get("minProperties", 0)
        for index in range(random.randrange(fewest, schema.get("maxProperties", fewest + 2) + 1)):
            made[f"more{index}"] = make_instance(random, more, top, depth - 1)
    return made


def _a_simple_one(random: Random, kind: str | None, schema: dict[str, Any]) -> Any:
    if kind == "string":
        if "pattern" in schema:
            return random.choice([*PATTERNS[schema["pattern"]], *PLAIN])
        return FORMATS[schema["format"]] if "format" in schema else random.choice(WORDS)
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -20))
        value = low + random.choice([0, 1, 2, 5, 10, 99, -1, 1000])
        if kind == "number" and random.random() < 0.5:
            value += 0.5
        value = round(value, 1)
        return int(value) if value == int(value) else value
    return {"boolean": random.random() < 0.5, "null": None}.get(kind or "", random.choice(VALUES))


def mutated(random: Random, instance: Any) -> Any:
    """A little different, somewhere in it."""
    if isinstance(instance, dict) and instance and random.random() < 0.8:
        name = random.choice(list(instance))
        if random.random() < 0.3:
            return {k: v for k, v in instance.items() if k != name}
        return {k: mutated(random, v) if k == name else v for k, v in instance.items()}
    if isinstance(instance, list) and instance and random.random() < 0.8:
        place = random.randrange(len(instance))
        if random.random() < 0.3:
            return instance[:place] + instance[place + 1 :]
        return [mutated(random, v) if i == place else v for i, v in enumerate(instance)]
    if isinstance(instance, str) and random.random() < 0.5:
        return random.choice([instance + "x", instance[:-1], instance.upper()])
    if isinstance(instance, int) and not isinstance(instance, bool) and random.random() < 0.5:
        return instance + random.choice([-100, -1, 1, 100])
    return random.choice(VALUES)


class OwnVocabulary:
    """Bytes, and these pieces; a text is cut into the longest that fit. bytes: no pieces."""

    bos_token_id = None

    def __init__(self, pieces: tuple[str, ...] = ()) -> None:
        self._tokens = [bytes([i]) for i in range(256)] + [piece.encode() for piece in pieces] + [b"<end>"]
        self.vocab_size = len(self._tokens)
        self.eos_token_ids = (self.vocab_size - 1,)
        self.special_ids = frozenset(self.eos_token_ids)
        self.special_tokens = {"<end>": self.vocab_size - 1}
        self._ids = {token: i for i, token in enumerate(self._tokens[:-1])}
        self._longest = max(map(len, self._ids))

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def encode_bit(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), []
        while data:
            size = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


# Tokens that reach over the ends of names, strings, numbers and brackets.
JSON_PIECES = (
    '{"', '"}', '":', '": ', '": "', '", "', '","', '"],', '}, {', '},{"', "[]", "[[", "]]", "{}", '[{"', '"]', ', "', ": [",
    "\n  ", '\n  "', "\n    ", "00", "10", "1.", ".5", "-1", "1}", "0]", '1, "', "true", "false,", "null}", "nu", "id", 'id": ',
    "name", 'name": "', "more0", '"tag": "', "cat", 'dog", "of', "ü", "\\\"", "\\n", "\\\\", "abc", "x_", "2026-", "12", "::",
)  # fmt: skip
