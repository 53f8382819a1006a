"""JSON schemas over the features of the language, with instances that are valid and that are not. Written for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """refused: the schema asks for what the grammars cannot say, and is answered with an error."""

    schema: Any
    valid: Sequence[Any] = ()
    invalid: Sequence[Any] = ()
    refused: bool = False


def one(**keywords: Any) -> dict[str, Any]:
    return keywords


def obj(required: list[str] | None = None, closed: bool = True, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required is not None:
        schema["required"] = required
    if closed:
        schema["additionalProperties"] = False
    return schema


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))

TYPES = [
    Case(STRING, ["", "abc", 'a "quote"', "ü🎉", "line\nbreak", "\\"], [1, None, True, [], {}]),
    Case(INTEGER, [0, -5, 123456], [1.5, "1", None, True, []]),
    Case(NUMBER, [0, -5, 1.5, 1e10, -2.5e-3], ["1", None, False, {}]),
    Case(BOOLEAN, [True, False], [0, 1, "true", None]),
    Case(NULL, [None], [0, "", False, "null"]),
    Case(one(type="array"), [[], [1, "a", None], [[[]]]], [{}, 1, "[]"]),
    Case(one(type="object"), [{}, {"a": 1}, {"a": {"b": []}}], [[], 1, "{}"]),
    Case(one(type=["string", "null"]), ["a", None], [1, [], True]),
    Case(one(type=["integer", "boolean"]), [3, True], ["3", 1.5, None]),
    Case({}, [1, "a", None, [], {"x": [1]}, True], []),
    Case(True, [1, "a", {}], []),
    Case(False, refused=True),
]
ENUMS = [
    Case(one(enum=["red", "green", "blue"]), ["red", "blue"], ["re", "redd", "yellow", 1, None]),
    Case(one(enum=[1, 2, 30]), [1, 2, 30], [3, 12, "1", 1.5]),
    Case(one(enum=[None, True, "a", 1]), [None, True, "a", 1], [False, "b", 2]),
    Case(one(enum=[{"a": 1}, [1, 2]]), [{"a": 1}, [1, 2]], [{"a": 2}, [1], [2, 1]]),
    Case(one(type="string", enum=["x", "xy", "xyz"]), ["x", "xy", "xyz"], ["", "y", "xyzz"]),
    Case(one(const="fixed"), ["fixed"], ["fixe", "Fixed", 1, None]),
    Case(one(const=42), [42], [4, 421, "42"]),
    Case(one(const=None), [None], [0, False]),
    Case(one(const={"a": [1, {"b": None}]}), [{"a": [1, {"b": None}]}], [{"a": [1]}, {"a": [1, {"b": 0}]}, {}]),
    Case(one(const=[]), [[]], [[1], {}]),
    Case(obj(["kind"], kind=one(const="cat")), [{"kind": "cat"}], [{"kind": "dog"}, {}, {"kind": None}]),
    Case(one(enum=['"', "\\", "\n", "ü"]), ['"', "\\", "\n", "ü"], ["a", ""]),
]
OBJECTS = [
    Case(obj(["a"], a=INTEGER), [{"a": 1}], [{}, {"a": "1"}, {"b": 1}, {"a": 1, "b": 2}]),
    Case(obj([], a=INTEGER, b=STRING), [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}], [{"c": 1}, {"a": "x"}]),
    Case(obj(["a", "b", "c"], a=INTEGER, b=STRING, c=BOOLEAN), [{"a": 1, "b": "", "c": True}], [{"a": 1, "b": ""}, {"a": 1, "b": "", "c": 0}]),
    Case(obj(["b"], a=INTEGER, b=INTEGER, c=INTEGER), [{"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}], [{"a": 1}, {"a": 1, "c": 2}, {}]),
    Case(obj(["a"], closed=False, a=INTEGER), [{"a": 1}, {"a": 1, "z": "anything"}, {"a": 1, "y": [], "z": {}}], [{"z": 1}, {}, {"a": "x"}]),
    Case(one(type="object", additionalProperties=INTEGER), [{}, {"x": 1}, {"x": 1, "y": 2}], [{"x": "1"}, {"x": 1, "y": None}]),
    Case(one(type="object", properties={"a": STRING}, additionalProperties=INTEGER), [{"a": "s"}, {"a": "s", "b": 1}, {"b": 1}], [{"a": 1}, {"a": "s", "b": "s"}]),
    Case(one(type="object", additionalProperties=False), [{}], [{"a": 1}, []]),
    Case(obj(["outer"], outer=obj(["inner"], inner=obj(["x"], x=INTEGER))), [{"outer": {"inner": {"x": 1}}}], [{"outer": {"inner": {}}}, {"outer": {}}, {"outer": {"inner": {"x": 1, "y": 1}}}]),
    Case(one(properties={"a": INTEGER}, type="object", required=["z"]), [{"a": 1, "z": 3}, {"z": None}], [{"a": 1}, {}]),
    Case(obj(["a b", "c.d", "é"], **{"a b": INTEGER, "c.d": INTEGER, "é": INTEGER}), [{"a b": 1, "c.d": 2, "é": 3}], [{"a b": 1}, {"ab": 1, "c.d": 2, "é": 3}]),
    Case(obj(['quote"d'], **{'quote"d': INTEGER}), [{'quote"d': 1}], [{"quoted": 1}]),
    Case(one(type="object", patternProperties={"^x_": INTEGER}, additionalProperties=False), [{}, {"x_a": 1}, {"x_a": 1, "x_b": 2}], [{"y": 1}, {"x_a": "1"}]),
    Case(one(type="object", minProperties=1), [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    Case(one(type="object", maxProperties=2), [{}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    Case(one(type="object", maxProperties=1, properties={"a": INTEGER}), refused=True),
    Case(one(type="object", propertyNames={"pattern": "^a"}, additionalProperties=INTEGER), [{"ab": 1}, {}], [{"b": 1}, {"a": "x"}]),
    Case(one(type="object", propertyNames={"minLength": 1, "maxLength": 2}), [{"é": 1, "a\n": 2}, {}], [{"": 1}, {"abc": 1}]),
    Case(one(type="object", propertyNames={"enum": ["a", "b"]}, additionalProperties=INTEGER), [{"a": 1, "b": 2}, {}], [{"c": 1}, {"a": "x"}]),
    Case(one(propertyNames={"$ref": "#/$defs/n"}, **{"$defs": {"n": {"title": "N", "enum": ["a", 2]}}}), [{"a": 1}, {}, 5], [{"2": 1}]),
    Case(one(type="object", propertyNames={"const": "a"}, properties={"a": STRING}), [{"a": "x"}], [{"a": 1}, {"b": 1}]),
    Case(one(allOf=[one(properties={"b": INTEGER}), one(propertyNames={"enum": ["b", "c"]})]), [{"b": 1}, {"c": 1}], [{"b": "x"}, {"d": 1}]),
    Case(one(type="object", propertyNames={"const": "a"}, properties={"b": STRING}), refused=True),
    Case(one(type="object", propertyNames={"pattern": "^a", "minLength": 2}), refused=True),
    Case(one(type="object", propertyNames={"enum": []}), refused=True),
    Case(one(type="object", propertyNames={"maxLength": "1}|(.*){1"}), refused=True),
    Case(one(type="object", propertyNames=False), refused=True),
    Case(one(type="object", dependentRequired={"a": ["b"]}), refused=True),
    Case(obj(["flag"], flag=BOOLEAN, note=one(type=["string", "null"])), [{"flag": True}, {"flag": False, "note": None}, {"flag": True, "note": "x"}], [{"flag": 1}, {"note": "x"}]),
    Case(one(type="object", properties={"a": False}, additionalProperties=INTEGER), [{}, {"b": 1}], [{"a": 1}]),
    Case(one(type="object", properties={"a": True}, additionalProperties=False), [{"a": 1}, {"a": []}, {}], [{"b": 1}]),
]  # fmt: skip
STRINGS = [
    Case(one(type="string", minLength=2), ["ab", "abc", "üü"], ["", "a", "ü"]),
    Case(one(type="string", maxLength=3), ["", "abc", "🎉🎉🎉"], ["abcd", "🎉🎉🎉🎉"]),
    Case(one(type="string", minLength=2, maxLength=4), ["ab", "abcd"], ["a", "abcde"]),
    Case(one(type="string", pattern="^[a-z]+$"), ["a", "abc"], ["", "A", "a1", "ab "]),
    Case(one(type="string", pattern="[0-9]"), ["1", "a1b", "x9"], ["", "abc"]),
    Case(one(type="string", pattern="^(GET|POST) /"), ["GET /", "POST /x/y"], ["PUT /", "GET", " GET /"]),
    Case(one(type="string", pattern=r"^\d{3}-\d{4}$"), ["123-4567"], ["1234567", "123-456", "abc-defg"]),
    Case(one(type="string", pattern="^[a-z]+$", maxLength=3), ["a", "abc"], ["abcd", "A"]),
    Case(one(type="string", pattern=r"^a\.b$"), ["a.b"], ["axb", "a.bc"]),
    Case(one(type="string", pattern="(?=x)"), refused=True),
    Case(one(type="string", pattern="(a)\\1"), refused=True),
    Case(one(type="string", pattern="["), refused=True),
    Case(one(type="string", format="date"), ["2026-11-22", "1999-01-31"], ["2026-13-01", "2026-1-1", "today", "22-11-2026"]),
    Case(one(type="string", format="time"), ["20:30:00Z", "23:59:59+01:00"], ["25:00:00Z", "20:30"]),
    Case(one(type="string", format="date-time"), ["2026-11-22T20:30:00Z", "2026-11-22T20:30:00.123+01:00"], ["2026-11-22", "2026-11-22 20:30"]),
    Case(one(type="string", format="email"), ["a@b.de", "first.last@example.com"], ["a", "a@", "@b.de"]),
    Case(one(type="string", format="uuid"), ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567e89b12d3a456426614174000"]),
    Case(one(type="string", format="ipv4"), ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "::1"]),
    Case(one(type="string", format="ipv6"), ["::", "::1", "1::", "2001:db8:0:0:0:0:0:1", "1:2:3:4:5:6:7:8", "fe80::a:B", "::ffff:192.168.0.1", "1:2:3:4:5:6:1.2.3.4", "1::3:4:5:6:7:8"], ["127.0.0.1", "xyz", "1:2:3", "12345::", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "::1.2.3.256", "1:2:3:4:5:6:7:1.2.3.4"]),
    Case(one(type="string", format="hostname"), ["example.com", "localhost"], ["-a.com", "a b"]),
    Case(one(type="string", format="uri"), ["https://example.com/a?b=c#d"], ["no scheme", ""]),
    Case(one(type="string", format="duration"), ["P1D", "PT5M"], ["1D", "P"]),
    Case(one(type="string", format="date"), ["2024-02-29", "2000-02-29"], ["2026-02-29", "2100-02-29", "2026-04-31", "2026-00-01"]),
    Case(one(type="string", format="time"), ["23:59:60Z", "00:59:60+01:00", "15:59:60-08:00", "05:29:60+05:30"], ["22:59:60Z", "23:59:60+01:00", "23:59:61Z"]),
    Case(one(type="string", format="date-time"), ["2024-02-29t23:59:60.5z"], ["2025-02-29T00:00:00Z", "1998-12-31T22:59:60Z", "2026-11-22T24:00:00Z"]),
    Case(one(type="string", format="date", pattern="^2"), ["2026-11-22"], ["1999-01-31", "2026-02-29"]),
    Case(one(type=["string", "null"], format="date"), ["2026-11-22", None], ["2026-02-29", 1]),
    Case(one(type="string", format="hostname"), ["a." * 126 + "b"], ["a." * 127 + "b"]),
    Case(one(type="string", format="uri-reference"), ["", "/a/b?c#d", "//h/x", "a/b", "./a:b", "http://[::1]:8/", "#f"], ["\\x", "a b", "http://[1]/", "1a:b"]),
    Case(one(type="string", format="json-pointer"), ["", "/", "/a~0b/~1"], ["a", "/~", "/~2"]),
    Case(one(type="string", format="relative-json-pointer"), ["0", "1#", "2/a"], ["", "/a", "01", "0##"]),
    Case(one(type="string", format="byte"), ["", "QUJD", "QQ=="], ["Q", "QQ", "QQ==QQ=="]),
    Case(one(type="string", format="base64url"), ["_-A="], ["+/A="]),
    Case(one(type="string", format="uuid4"), ["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
    Case(one(type="string", format="ipvanyaddress"), ["1.2.3.4", "::1"], ["1.2.3.4/8", "x"]),
    Case(one(type="string", format="ipv4network"), ["10.0.0.0/8"], ["10.0.0.0/33", "::1"]),
    Case(one(type="string", format="ipvanynetwork"), ["10.0.0.0/8", "fe80::/128"], ["fe80::/129"]),
    Case(one(type="string", format="multi-host-uri"), ["postgres://u:p@a:1,b:2/db"], ["a,b", "x y://z"]),
    Case(one(type="string", format="password", minLength=2), ["ab"], ["a", 1]),
    Case(one(type="string", format="path"), ["", "/x y"], [1]),
    Case(one(format="int32"), ["a", 1], []),
    Case(one(type="string", format="regex"), refused=True),
    Case(one(type="string", format="of-my-own"), refused=True),
]  # fmt: skip
NUMBERS = [
    Case(one(type="integer", minimum=0), [0, 7, 1000], [-1, 1.5]),
    Case(one(type="integer", maximum=10), [10, -5, 0], [11, 100]),
    Case(one(type="integer", minimum=-3, maximum=12), [-3, 0, 12, 9], [-4, 13, 120]),
    Case(one(type="integer", exclusiveMinimum=0), [1, 100], [0, -1]),
    Case(one(type="integer", exclusiveMaximum=100), [99, 0, -1], [100, 101]),
    Case(one(type="integer", minimum=17, maximum=17), [17], [16, 18, 1]),
    Case(one(type="number", minimum=0, maximum=1), [0, 1, 0.5, 0.001], [-0.1, 1.1, 2]),
    Case(one(type="number", exclusiveMinimum=0, exclusiveMaximum=1), [0.5, 0.999], [0, 1, 1.5]),
    Case(one(type="number", minimum=-1.5, maximum=2.25), [-1.5, 0, 2.25, 2.19], [-1.6, 2.3]),
    Case(one(type="integer", multipleOf=5), [0, 5, 100], [1, 7, 12]),
    Case(one(type="integer", multipleOf=3, minimum=0, maximum=20), [0, 3, 18], [1, 21, -3]),
    Case(one(type="number", multipleOf=0.5), [0.5, 1, 2.5], [0.3, 1.25]),
    Case(one(type="integer", minimum=10, maximum=5), refused=True),
]
ARRAYS = [
    Case(one(type="array", items=INTEGER), [[], [1], [1, 2, 3]], [["a"], [1, None], [1.5]]),
    Case(one(type="array", items=STRING, minItems=1), [["a"], ["a", "b"]], [[], [1]]),
    Case(one(type="array", items=STRING, maxItems=2), [[], ["a"], ["a", "b"]], [["a", "b", "c"]]),
    Case(one(type="array", items=INTEGER, minItems=2, maxItems=3), [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4], []]),
    Case(one(type="array", minItems=1, maxItems=1), [[1], ["a"], [[]]], [[], [1, 2]]),
    Case(one(type="array", items=obj(["x"], x=INTEGER)), [[], [{"x": 1}], [{"x": 1}, {"x": 2}]], [[{}], [{"x": "1"}], [1]]),
    Case(one(type="array", items=one(type="array", items=INTEGER)), [[], [[]], [[1], [2, 3]]], [[1], [["a"]]]),
    Case(one(type="array", prefixItems=[INTEGER, STRING], items=False, minItems=2), [[1, "a"]], [[1], ["a", 1], [1, "a", 2]]),
    Case(one(type="array", prefixItems=[INTEGER], items=STRING), [[], [1], [1, "a", "b"]], [["a"], [1, 2]]),
    Case(one(type="array", items=one(enum=["a", "b"])), [[], ["a"], ["b", "a", "a"]], [["c"], [None]]),
    Case(one(type="array", items=False), [[]], [[1]]),
    Case(one(type="array", items=True, maxItems=1), [[], [{}]], [[1, 2]]),
    Case(one(type="array", uniqueItems=True), refused=True),
    Case(one(type="array", contains=INTEGER), refused=True),
    Case(one(type="array", items=INTEGER, minItems=3, maxItems=2), refused=True),
]  # fmt: skip
CAT, DOG = (
    obj(["kind", "lives"], kind=one(const="cat"), lives=INTEGER),
    obj(["kind", "tail"], kind=one(const="dog"), tail=BOOLEAN),
)
NODE = {"$ref": "#/$defs/node"}
COMBINED = [
    Case(one(anyOf=[STRING, INTEGER]), ["a", 1], [1.5, None, []]),
    Case(one(anyOf=[CAT, DOG]), [{"kind": "cat", "lives": 9}, {"kind": "dog", "tail": True}], [{"kind": "cat", "tail": True}, {"kind": "cow"}, {}]),
    Case(one(anyOf=[obj(["a"], a=INTEGER), obj(["b"], b=INTEGER)]), [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}, {"c": 1}]),
    Case(one(anyOf=[one(type="string", maxLength=2), one(type="string", pattern="^x+$")]), ["ab", "xxxx"], ["abc", "xxxxy"]),
    Case(one(oneOf=[STRING, INTEGER]), ["a", 1], [1.5, None]),
    Case(one(oneOf=[CAT, DOG]), [{"kind": "cat", "lives": 9}, {"kind": "dog", "tail": False}], [{"kind": "dog", "lives": 1}]),
    Case(one(oneOf=[INTEGER, NUMBER]), refused=True),
    Case(one(oneOf=[one(type="integer", minimum=0), one(type="integer", maximum=10)]), refused=True),
    Case(one(allOf=[one(type="integer", minimum=0), one(maximum=9)]), [0, 9], [-1, 10]),
    Case(one(allOf=[obj(["a"], closed=False, a=INTEGER), obj(["b"], closed=False, b=STRING)]), [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}]),
    Case(one(allOf=[STRING]), ["a"], [1]),
    Case(one(type="string", anyOf=[one(minLength=5), one(maxLength=2)]), ["", "ab", "abcde"], ["abc", "abcd"]),
    Case(obj(["v"], v=one(anyOf=[NULL, obj(["n"], n=INTEGER)])), [{"v": None}, {"v": {"n": 1}}], [{"v": {}}, {"v": 1}]),
    Case({"not": STRING}, refused=True),
    Case(one(type="string") | {"not": one(const="x")}, refused=True),
    Case({"if": one(properties={"a": one(const=1)}), "then": one(required=["b"])}, refused=True),
    Case(one(**{"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}), [1, -2], ["1", None]),
    Case(one(**{"$ref": "#/definitions/n", "definitions": {"n": STRING}}), ["a"], [1]),
    Case(obj(["a", "b"], a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}) | {"$defs": {"p": obj(["x"], x=INTEGER)}}, [{"a": {"x": 1}, "b": {"x": 2}}], [{"a": {"x": 1}}, {"a": {"x": 1}, "b": {}}]),
    Case(one(**{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": BOOLEAN}, "$ref": "#/$defs/a"}), [True], [1, "true"]),
    Case(NODE | {"$defs": {"node": obj(["v"], v=INTEGER, next=NODE)}}, [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}], [{"next": {"v": 1}}, {"v": 1, "next": {}}]),
    Case(NODE | {"$defs": {"node": obj(["name", "children"], name=STRING, children=one(type="array", items=NODE))}}, [{"name": "a", "children": []}, {"name": "a", "children": [{"name": "b", "children": []}]}], [{"name": "a"}, {"name": "a", "children": [{}]}]),
    Case(one(**{"$defs": {"e": one(anyOf=[INTEGER, obj(["op", "l", "r"], op=one(enum=["+", "*"]), l={"$ref": "#/$defs/e"}, r={"$ref": "#/$defs/e"})])}, "$ref": "#/$defs/e"}), [1, {"op": "+", "l": 1, "r": {"op": "*", "l": 2, "r": 3}}], [{"op": "-", "l": 1, "r": 2}, {"op": "+", "l": 1}]),
    Case(one(type="array", items={"$ref": "#"}), [[], [[]], [[], [[]]]], [[1], 1]),
    Case({"$ref": "https://example.com/other.json"}, refused=True),
    Case({"$ref": "#/$defs/absent"}, refused=True),
    Case(one(type="mystery"), refused=True),
    Case(one(type="integer", minimum="a"), refused=True),
    Case(one(type="object", properties=[1]), refused=True),
    Case(one(type="string", title="T", description="D", examples=["x"], default="y", deprecated=True), ["z"], [1]),
    Case({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", "type": "integer"}, [1], ["a"]),
    Case(one(type="string", contentMediaType="text/html"), ["<b>"], [1]),
]  # fmt: skip
LARGER = [
    Case(
        obj(
            ["title", "steps", "meta"],
            title=one(type="string", minLength=1, maxLength=40),
            steps=one(type="array", minItems=1, items=obj(["do"], do=STRING, minutes=one(type="integer", minimum=1, maximum=90))),
            meta=obj(["level", "tags"], level=one(enum=["easy", "hard"]), tags=one(type="array", items=STRING, maxItems=3)),
        ),
        [{"title": "Tea", "steps": [{"do": "boil", "minutes": 3}, {"do": "pour"}], "meta": {"level": "easy", "tags": []}}],
        [{"title": "", "steps": [{"do": "x"}], "meta": {"level": "easy", "tags": []}}, {"title": "Tea", "steps": [], "meta": {"level": "easy", "tags": []}}, {"title": "Tea", "steps": [{"do": "x", "minutes": 91}], "meta": {"level": "easy", "tags": []}}],
    ),
    Case(obj([f"f{i}" for i in range(40)], **{f"f{i}": INTEGER for i in range(40)}), [{f"f{i}": i for i in range(40)}], [{f"f{i}": i for i in range(39)}, {"f0": "x"}]),
    Case(obj([], **{f"o{i}": BOOLEAN for i in range(30)}), [{}, {"o3": True, "o17": False}, {f"o{i}": True for i in range(30)}], [{"o31": True}, {"o3": 1}]),
    Case(one(enum=[f"value {i}" for i in range(500)]), ["value 0", "value 499"], ["value 500", "value", "value 1x"]),
    Case(one(type="array", items=one(type="string", maxLength=20), minItems=20, maxItems=20), [["x"] * 20], [["x"] * 19, ["x"] * 21]),
]  # fmt: skip
# As programs write schemas, older drafts among them.
WRITTEN = [
    Case(one(type="integer", minimum=0, exclusiveMinimum=True), [1], [0]),
    Case(one(type="array", items=[INTEGER], additionalItems=False), [[1], []], [[1, 2], ["a"]]),
    Case(one(type="array", items=INTEGER, uniqueItems=False), [[1, 1]], [["a"]]),
    Case(one(type="array", items=INTEGER, minContains=1), [[1]], [["a"]]),
    Case(one(type="object", propertyNames=STRING, additionalProperties=INTEGER), [{"a": 1}], [{"a": "x"}]),
    Case(one(type="object", dependencies={}, dependentRequired={}, dependentSchemas={}), [{"a": 1}], [1]),
    Case(obj(["a"], a=INTEGER) | one(unevaluatedProperties=True), [{"a": 1}], [{}]),
    Case(one(type="array", unevaluatedItems=True), [[1]], [1]),
    Case(one(type="integer") | {"then": STRING, "else": NULL}, [1], ["a"]),
    Case(one(type="integer") | {"if": STRING}, [1], ["a"]),
    Case(one(type="integer") | {"not": False}, [1], ["a"]),
    Case(obj([], uniqueItems=BOOLEAN, enum=obj(["then"], then=INTEGER)), [{"uniqueItems": False}, {"enum": {"then": 1}}], [{"enum": {}}, {"enum": {"then": "a"}}]),
    Case(one(type="object", dependencies={"a": ["b"]}), refused=True),
    Case(one(type="object", dependentSchemas={"a": one(required=["b"])}), refused=True),
    Case(obj(["a"], a=INTEGER) | one(unevaluatedProperties=False), refused=True),
    Case(one(type="array", unevaluatedItems=False), refused=True),
    Case({"$dynamicRef": "#x"}, refused=True),
    Case({"$recursiveRef": "#"}, refused=True),
    Case({"not": {}}, refused=True),
    Case(one(enum=[1, 2], type="string"), refused=True),
    Case(one(const=1, minimum=3), refused=True),
    Case(one(type="string", minLength=3, maxLength=1), refused=True),
    Case(one(type="integer", minimum=10**20), refused=True),
    Case(one(type="string", pattern=r"^\bword\b$"), refused=True),
    Case(one(properties={"a": INTEGER}), [{"a": 1}, 5, "s", [1]], [{"a": "x"}]),
    Case(one(required=["a"]), [{"a": 1}, 5], [{}]),
    Case(one(minLength=2), ["ab", 1, None], ["a"]),
    Case(one(minimum=2), [3, "a"], [1]),
    Case(one(minItems=1), [[1], "a"], [[]]),
    Case(one(type="number", multipleOf=0.01), [0.01, 1.25], [0.005]),
    Case(one(type="number", multipleOf=0.1, minimum=0, maximum=1), [0.1], [0.35]),
    Case(one(type="integer", minimum=0.5, maximum=3.5), [1, 3], [0, 4]),
    Case(one(type="string", pattern=r"^\p{L}+$"), ["é"], ["1"]),
    Case(one(type="string", pattern=r"^\S+$"), ["a", 'q"q'], ["a b"]),
    Case(one(type="string", pattern="^.*$"), ['q"q', "back\\s"], ["a\nb"]),
    Case(one(type="integer", format="int64"), [5], ["5"]),
    Case(one(type="number", format="double"), [5.5], ["5"]),
    Case(one(type="object", properties={"a": INTEGER, "b": {"$ref": "#/properties/a"}}), [{"a": 1, "b": 2}], [{"b": "x"}]),
    Case({"$defs": {"x": {"$anchor": "xx", "type": "integer"}}, "$ref": "#xx"}, [1], ["a"]),
    Case({"$defs": {"x": {"$id": "foo", "type": "integer"}}, "$ref": "foo"}, [1], ["a"]),
    Case({"$defs": {"a/b": INTEGER, "c~d": STRING, "e f": NULL}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}, {"$ref": "#/$defs/e%20f"}]}, [1, "a", None], [True, []]),
    Case({"$ref": "#/$defs/x", "maxLength": 1, "$defs": {"x": STRING}}, ["a"], ["ab", 1]),
    Case({"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#/definitions/x", "maxLength": 1}, "definitions": {"x": STRING}}, [["ab"]], [[1]]),
    Case({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": {"$ref": "#/$defs/x", "maxLength": 1}, "$defs": {"x": STRING}}, [["a"]], [["ab"], [1]]),
    Case(one(type="object", properties={"a": INTEGER, "b": INTEGER}, anyOf=[one(required=["a"]), one(required=["b"])]), [{"a": 1}, {"b": 1}], [{}]),
    Case(one(type=["object", "null"], properties={"a": STRING}, required=["a"], additionalProperties=False), [None, {"a": "x"}], [{}, {"a": 1}]),
    Case(one(type="object", properties={"a": STRING}, patternProperties={"^a": one(maxLength=1)}, additionalProperties=False), [{"a": "x"}, {"ab": 1}], [{"a": "xx"}, {"ab": "xx"}, {"b": 1}]),
    Case(one(allOf=[obj([], a=INTEGER), one(type="object", properties={"b": INTEGER})]), [{"a": 1}, {}], [{"b": 1}]),
    Case(one(type="object", properties={"": INTEGER}, required=[""]), [{"": 1}], [{}]),
    Case(one(type="array", maxItems=0), [[]], [[1]]),
    Case(one(type="string", maxLength=0), [""], ["a"]),
    Case(one(readOnly=True, type="integer", unknownKeyword=5) | {"$comment": "x", "x-own": 1, "discriminator": {"propertyName": "k"}}, [1], ["a"]),
    Case(STRING, ["\u2028", "\ud7ff", "\U0010ffff", "\x00"], [1]),
]  # fmt: skip
CASES = [*WRITTEN, *TYPES, *ENUMS, *OBJECTS, *STRINGS, *NUMBERS, *ARRAYS, *COMBINED, *LARGER]
