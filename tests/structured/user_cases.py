"""Schemas as users and attackers write them, with instances that jsonschema judges. Written for these tests."""

from __future__ import annotations

from typing import Any

S = {"type": "string"}
I = {"type": "integer"}
N = {"type": "number"}
B = {"type": "boolean"}
Z = {"type": "null"}


def obj(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **more}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


CAT = obj(["t", "lives"], t={"const": "cat"}, lives=I)
DOG = obj(["t", "tail"], t={"const": "dog"}, tail=B)
OPEN_CAT = {"properties": {"t": {"const": "cat"}}, "required": ["t"], "type": "object"}
OPEN_DOG = {"properties": {"t": {"enum": ["dog", "wolf"]}}, "required": ["t"], "type": "object"}

# Each: a schema, and instances of both kinds. All of these are followed.
FOLLOWED: list[tuple[Any, ...]] = [
    # oneOf of what cannot overlap
    ({"oneOf": [{"const": 1}, {"const": 2}]}, 1, 2, 3, "1"),
    ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}, "a", "b", "c", ""),
    ({"oneOf": [{"const": 1}, {"const": True}]}, 1, True, 0, False),
    ({"oneOf": [{"enum": ["a", 1]}, {"enum": ["b", None]}, I | {"minimum": 5, "enum": [5, 6]}]}, "a", 1, "b", None, 5, 4, 7),
    ({"oneOf": [Z, ref("s")], "$defs": {"s": S}}, None, "a", 1, False),
    ({"oneOf": [ref("cat"), ref("dog")], "$defs": {"cat": CAT, "dog": DOG}}, {"t": "cat", "lives": 9}, {"t": "dog", "tail": True}, {"t": "dog", "lives": 1}, {"t": "cow"}, {}),
    ({"oneOf": [OPEN_CAT, OPEN_DOG]}, {"t": "cat"}, {"t": "wolf"}, {"t": "cow"}, {}),
    ({"oneOf": [obj(["a"], a=I), obj(["b"], b=I)]}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}),
    ({"oneOf": [S | {"maxLength": 2}, S | {"minLength": 4}]}, "", "ab", "abcd", "abc"),
    ({"oneOf": [I | {"maximum": 3}, I | {"minimum": 7}]}, 3, 7, 4, 6, -1, 70),
    ({"oneOf": [S, I], "anyOf": [I, B]}, 1, "a", True),
    (obj(["v"], v={"oneOf": [Z, ref("p")]}) | {"$defs": {"p": obj(["x"], x=I, next={"oneOf": [Z, ref("p")]})}}, {"v": None}, {"v": {"x": 1, "next": {"x": 2, "next": None}}}, {"v": {"next": None}}),
    ({"$defs": {"e": {"oneOf": [I, obj(["op", "l", "r"], op={"enum": ["+", "-"]}, l=ref("e"), r=ref("e"))]}}, "$ref": "#/$defs/e"}, 1, {"op": "+", "l": 1, "r": {"op": "-", "l": 2, "r": 3}}, {"op": "*", "l": 1, "r": 1}, {"op": "+", "l": 1}, "1"),
    # recursion
    ({"type": "array", "items": {"anyOf": [I, {"$ref": "#"}]}}, [], [1], [1, [2, []]], ["a"], [[["b"]]]),
    ({"type": "object", "properties": {"c": {"$ref": "#"}, "v": I}, "required": ["v"], "additionalProperties": False}, {"v": 1}, {"c": {"v": 1}, "v": 2}, {"c": {}, "v": 1}),
    ({"$defs": {"even": {"anyOf": [Z, obj(["n"], n=ref("odd"))]}, "odd": obj(["n"], n=ref("even"))}, "$ref": "#/$defs/even"}, None, {"n": {"n": None}}, {"n": None}, {"n": {"n": {"n": None}}}),
    ({"$defs": {"j": {"anyOf": [S, N, B, Z, {"type": "array", "items": ref("j")}, {"type": "object", "additionalProperties": ref("j")}]}}, "$ref": "#/$defs/j"}, {"a": [1, None, {"b": True}]}, "x", 1.5),
    # booleans and what is empty
    ({"anyOf": [False, I]}, 1, "a"),
    ({"oneOf": [False, I]}, 1, "a"),
    ({"allOf": [True, I]}, 1, "a"),
    ({"type": "object", "required": ["x"]}, {"x": 1}, {"x": []}, {}),
    ({"type": "object", "required": ["x", "y"], "additionalProperties": I}, {"x": 1, "y": 2}, {"x": 1}, {"x": 1, "y": "a"}),
    ({"const": ""}, "", "a"),
    ({"const": {}}, {}, {"a": 1}),
    # enums
    ({"enum": ["a", "a"]}, "a", "b"),
    ({"enum": [0, False]}, 0, False, 1, True),
    ({"enum": [1.5, "1.5"]}, 1.5, "1.5", 1),
    ({"type": ["string", "integer"], "enum": ["a", 1, None]}, "a", 1, None),
    ({"enum": ["abc", "xyz"], "pattern": "^a"}, "abc", "xyz"),
    ({"enum": ["abc", "xyzz"], "maxLength": 3}, "abc", "xyzz"),
    ({"enum": [1, 5, 10], "minimum": 5}, 5, 10, 1),
    ({"enum": [f"item-{i:04}" for i in range(2000)]}, "item-0000", "item-1999", "item-2000", "item-"),
    ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, "b", "a", "c"),
    # patterns
    (text("a", minLength=3), "bab", "a", "bbb"),
    (text("^(ab)*$", maxLength=5), "", "abab", "ababab", "aba"),
    (text("^[^a-c]$"), "d", "a", "ü", "\n"),
    (text("^a|b$"), "axx", "xxb", "xbx", "bx"),
    (text("^(?:a|b|)$"), "a", "", "c"),
    (text("(^a|^b)c$"), "ac", "bc", "xac"),
    (text('^"quoted"$'), '"quoted"', "quoted"),
    (text(r"^\\$"), "\\", "/"),
    (text("^a/b$"), "a/b", "ab"),
    (text(r"^\/path\/[a-z]+$"), "/path/x", "path/x"),
    (text("(a+)+$"), "aaa", "b"),
    (text("^[a-z]{1000}$"), "a" * 1000, "a" * 999),
    (text("(?i:abc)"), "xABCx", "abd"),
    (text("^.$"), "a", "😀", "\n", "ab"),
    (text(r"^(?:[a-z]{1,63}\.){1,127}[a-z]{2,}$"), "a.de", "de"),
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, "ab", "abc", "a", "abcd"),
    # numbers
    ({"type": "integer", "minimum": -5, "exclusiveMinimum": -5}, -4, -5),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0.5, 0.25, 0, 0.0, -0.0, 0.6, -0.1),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, 0.0005, 0, 0.001, 0.0),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, -0.5, -0.25, 0, 0.0, -0.0, -0.6, 0.1),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5}, 0.5, 0, 0.0),
    ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, 0.5, 0, 0.0),
    ({"exclusiveMinimum": 0, "maximum": 0.5}, 0.5, "a", None, 0, 0.0),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, 1, 2, 0, 3),
    ({"type": "number", "minimum": 0.1, "maximum": 0.1}, 0.1, 0.2, 0),
    ({"type": "integer", "minimum": -100, "maximum": -10}, -100, -10, -55, -9, -101, 55),
    ({"type": "integer", "multipleOf": 7, "minimum": 1}, 7, 14, 1, 0, 15),
    ({"type": "integer", "multipleOf": 1000000}, 0, 1000000, 3000000, 1, 100000),
    ({"type": "number", "multipleOf": 0.5}, 0.5, 1.5, 0.3),
    ({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}, 12, 24, 4, 6),
    ({"type": ["integer", "string"], "minimum": 5, "minLength": 2}, 5, "ab", 4, "a"),
    # arrays
    ({"type": "array", "items": I, "minItems": 50, "maxItems": 50}, [1] * 50, [1] * 49, [1] * 51),
    ({"type": "array", "prefixItems": [I, S], "items": B, "minItems": 3, "maxItems": 4}, [1, "a", True], [1, "a"], [1, "a", 1], [1, "a", True, False, True]),
    ({"type": "array", "prefixItems": [I, False]}, [], [1], [1, 2]),
    ({"type": "array", "items": I, "maxItems": 1, "uniqueItems": True}, [], [1], [1, 1], ["a"]),
    ({"items": I}, [1], "x", {}, ["a"]),
    # objects
    ({"type": "object", "properties": {"a": I, "b": I}, "required": ["a"], "minProperties": 1}, {"a": 1}, {}, {"b": 1}),
    (obj([], a=I, b=I) | {"maxProperties": 2}, {}, {"a": 1, "b": 2}, {"c": 1}),
    ({"type": "object", "minProperties": 3, "maxProperties": 3, "additionalProperties": I}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}),
    ({"type": "object", "patternProperties": {r"^\$": I}, "additionalProperties": False}, {"$a": 1}, {"a": 1}, {"$a": "x"}),
    ({"type": "object", "patternProperties": {"^a$": False}, "additionalProperties": I}, {"b": 1}, {"a": 1}),
    (obj(["x\ny", "é😀", "a\\b", ""], **{"x\ny": I, "é😀": I, "a\\b": I, "": I}), {"x\ny": 1, "é😀": 2, "a\\b": 3, "": 4}, {"x\ny": 1}),
    ({"type": "object", "properties": {"$ref": S, "type": I, "oneOf": {"type": "array", "items": I}}}, {"$ref": "x"}, {"type": 1}, {"oneOf": [1, 2]}, {"type": "a"}, {"oneOf": ["a"]}),
    (obj([f"p{i}" for i in range(0, 300, 2)], **{f"p{i}": I for i in range(300)}), {f"p{i}": i for i in range(0, 300, 2)}, {f"p{i}": i for i in range(2, 300, 2)}),
    # references
    ({"$ref": "#/$defs/a%22b", "$defs": {'a"b': I}}, 1, "a"),
    ({"$ref": "#/$defs/a/properties/b", "$defs": {"a": obj([], b=I)}}, 1, "a"),
    ({"allOf": [ref("base"), {"type": "object", "properties": {"y": I}, "required": ["y"]}], "$defs": {"base": {"type": "object", "properties": {"x": I}, "required": ["x"]}}}, {"x": 1, "y": 2}, {"x": 1}, {"y": 2}),
]  # fmt: skip
# Each: a schema, and what the refusal names.
REFUSED: list[tuple[Any, str]] = [
    ({"oneOf": [I, N]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    ({"oneOf": [{"type": "array", "items": I}, {"type": "array", "items": S}]}, "oneOf"),
    ({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}, "oneOf"),
    ({"oneOf": [{"$id": "http://x/y", "oneOf": [ref("a"), Z], "$defs": {"a": Z}}, S], "$defs": {"a": I}}, "oneOf"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    ({"type": "integer", "multipleOf": -2}, "multipleOf"),
    ({"type": "integer", "multipleOf": 123457}, "multipleOf"),
    ({"type": "integer", "multipleOf": 1000000007}, "multipleOf"),
    ({"type": "number", "multipleOf": 123.457}, "multipleOf"),
    (text("^((a{100}){100}){100}$"), "pattern: counts within counts"),
    ({"type": "object", "patternProperties": {"^((a{100}){100}){100}$": I}}, "pattern: counts within counts"),
    (text(r"^(?:\S+\s+){0,49}\S+$", maxLength=500), "pattern: a count (49)"),
    (text(r"^(\S+(\s+)){2,19}", minLength=600), "pattern: a count (19)"),
    (obj([], **{f"p{i}": I for i in range(2000)}), "properties: 2000"),
    ({"not": {}}, '"not"'),
    ({"type": "array", "items": I, "uniqueItems": True}, '"uniqueItems"'),
    ({"if": I, "then": {"minimum": 3}}, '"if"'),
    (text("(?!foo)"), "look-around"),
    ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
    ({"$ref": "#/nowhere"}, "/nowhere"),
    ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}, "minProperties": "1"}, "minProperties"),
]
