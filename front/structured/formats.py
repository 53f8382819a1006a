"""Formats of texts as patterns, where back ends do not know them or let pass what is none of them.

Sources: RFC 3339 (dates and times), RFC 3986 (addresses of resources), RFC 6901 (pointers), RFC 4648 (base 64),
RFC 9562 (UUIDs); and the names that programs which write schemas have for texts of their own, pydantic's and OpenAPI's.
"""

from __future__ import annotations

from typing import Any

_H, _BYTE = "[0-9A-Fa-f]{1,4}", "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_LAST = rf"({_H}:{_H}|{_IPV4})"
# Those of both back ends do not know such as end as an IPv4 address.
_IPV6 = "(" + "|".join(
    [f"({_H}:){{6}}{_LAST}", f"::({_H}:){{5}}{_LAST}"]
    + [f"(({_H}:){{0,{4 - n}}}{_H})?::({_H}:){{{n}}}{_LAST}" for n in range(4, -1, -1)]
    + [f"(({_H}:){{0,5}}{_H})?::{_H}", f"(({_H}:){{0,6}}{_H})?::"]
) + ")"  # fmt: skip
_PREFIX4, _PREFIX6 = "([0-9]|[12][0-9]|3[0-2])", "([0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])"

# The 29th of February is of every fourth year, and of every fourth century.
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY, _TO_30 = "(0[1-9]|[12][0-9]|3[01])", "(0[1-9]|[12][0-9]|30)"
_DATE = (
    f"([0-9]{{4}}-((0[13578]|1[02])-{_DAY}|(0[469]|11)-{_TO_30}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)  # fmt: skip


def _leap_seconds() -> str:
    """The last minute of a day in UTC, as the clocks of all offsets of whole half hours show it."""
    shown = [r"23:59:60(\.[0-9]+)?([Zz]|[+-]00:00)"]
    for minutes in range(30, 1440, 30):
        for sign, clock in (("[+]", minutes - 1), ("-", 1439 - minutes)):
            shown.append(f"{clock // 60:02}:{clock % 60:02}:60{sign}{minutes // 60:02}:{minutes % 60:02}")
    return "|".join(shown)


_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"({_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR}:[0-5][0-9])|{_leap_seconds()})"

_PLAIN = r"A-Za-z0-9._~!$&'()*+,;=\-"  # characters of a resource's address that stand for themselves
_ESCAPED = "%[0-9A-Fa-f]{2}"
_ONE, _NO_COLON = f"([{_PLAIN}:@]|{_ESCAPED})", f"([{_PLAIN}@]|{_ESCAPED})"
_AUTHORITY = (
    rf"(([{_PLAIN}:]|{_ESCAPED})*@)?(\[({_IPV6}|v[0-9A-Fa-f]+\.[{_PLAIN}:]+)\]|([{_PLAIN}]|{_ESCAPED})*)(:[0-9]*)?"
)
_REST = f"(/{_ONE}*)*"
_ROOTED = f"/({_ONE}+{_REST})?"
_BEHIND = rf"(\?({_ONE}|[/?])*)?(#({_ONE}|[/?])*)?"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_REFERENCE = (
    f"(({_SCHEME}:)?(//{_AUTHORITY}{_REST}|{_ROOTED})|{_SCHEME}:({_ONE}+{_REST})?|({_NO_COLON}+{_REST})?){_BEHIND}"
)  # fmt: skip

_POINTER = "(/([^/~]|~[01])*)*"


def _base64(more: str) -> str:
    sign = f"[A-Za-z0-9{more}]"
    return f"({sign}{{4}})*({sign}{{2}}==|{sign}{{3}}=)?"


def _uuid(version: int) -> str:
    hex_digit = "[0-9A-Fa-f]"
    return f"{hex_digit}{{8}}-{hex_digit}{{4}}-{version}{hex_digit}{{3}}-[89ABab]{hex_digit}{{3}}-{hex_digit}{{12}}"


_MADE = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "ipv6": _IPV6,
    "uri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "byte": _base64("+/"),
    "base64": _base64("+/"),
    "base64url": _base64("_-"),
    "multi-host-uri": rf"{_SCHEME}://[{_PLAIN}:@%/?#\[\]]+",
    "ipvanyaddress": f"({_IPV4}|{_IPV6})",
    "ipvanynetwork": f"({_IPV4}(/{_PREFIX4})?|{_IPV6}(/{_PREFIX6})?)",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
    **{f"ipv4{kind}": f"{_IPV4}(/{_PREFIX4})?" for kind in ("network", "interface")},
    **{f"ipv6{kind}": f"{_IPV6}(/{_PREFIX6})?" for kind in ("network", "interface")},
}
PATTERNS = {name: f"^({pattern})$" for name, pattern in _MADE.items()}
# Of any text, or of numbers: what they say of a text is nothing that could be followed.
SAY_NOTHING = frozenset(
    ("password", "binary", "path", "file-path", "directory-path", "int32", "int64", "float", "double")
)
MAX_HOSTNAME = 253  # RFC 1123
_BOTH = ("date", "date-time", "ipv6", "time")  # xgrammar lets pass days that no calendar has


def name_format(schema: dict[str, Any], narrow: bool) -> None:
    """In place: a pattern in the place of the format, where there is one. narrow: for llguidance; xgrammar has its own
    formats, but for some."""
    form = schema.get("format")
    if not isinstance(form, str) or "enum" in schema or "const" in schema:
        return
    if form in SAY_NOTHING:
        del schema["format"]
    elif form in PATTERNS and (narrow or form in _BOTH):
        del schema["format"]
        if "pattern" in schema:
            others = schema.get("allOf")
            schema["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": PATTERNS[form]}]
        else:
            schema["pattern"] = PATTERNS[form]
    elif form == "hostname" and narrow:
        longest = schema.get("maxLength")
        schema["maxLength"] = min(longest, MAX_HOSTNAME) if isinstance(longest, int) else MAX_HOSTNAME
