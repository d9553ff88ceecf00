"""String formats of JSON Schema as regular expressions: each is a subset of its standard, checked in the tests."""

from __future__ import annotations

from functools import cache

from runtime.grammar.regex import parse_full
from runtime.grammar.regular import Regex

_LEAP = r"[1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00"
_PLAIN_DATE = (
    r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_DATE = rf"({_PLAIN_DATE}|({_LEAP})-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,7}}"  # 8 labels of 30 characters: always below the standard's 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"{_ATOM}{{1,30}}(\.{_ATOM}{{1,30}})?@{_LABEL}(\.{_LABEL}){{0,5}}"  # below the standard's 254 in all
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"({_HEX}:){{7}}{_HEX}", rf"({_HEX}:){{1,7}}:", rf":((:{_HEX}){{1,7}}|:)"]
    + [rf"({_HEX}:){{1,{left}}}(:{_HEX}){{1,{7 - left}}}" for left in range(1, 7)]
)
_UUID = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
_PCHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f][0-9A-Fa-f])"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(//({_HOST}|{_IPV4})(:\d{{1,5}})?(/{_PCHAR}*)*|{_PCHAR}+(/{_PCHAR}*)*)"
    rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
)
_SECONDS = r"\d{1,9}S"
_MINUTES = rf"\d{{1,9}}M({_SECONDS})?"
_CLOCK = rf"T(\d{{1,9}}H({_MINUTES})?|{_MINUTES}|{_SECONDS})"  # RFC 3339: no hours and seconds without minutes
_DAYS = r"(\d{1,9}Y(\d{1,9}M(\d{1,9}D)?)?|\d{1,9}M(\d{1,9}D)?|\d{1,9}D)"
_DURATION = rf"P({_DAYS}({_CLOCK})?|{_CLOCK}|\d{{1,9}}W)"
_POINTER = r"(/([^/~]|~[01])*)*"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "uri": _URI,
    "uuid": _UUID,
}

ENFORCED = frozenset(_PATTERNS)
ANNOTATIONS = frozenset({"float", "double", "password"})  # say nothing that a grammar could check
INTEGER_BITS = {"int32": 32, "int64": 64}


@cache
def regex_of(name: str) -> Regex:
    """The texts of a format in ENFORCED."""
    return parse_full(_PATTERNS[name])
