"""Numbers under bounds, judged as most readers take them: parsed as doubles, in Python's exact comparison."""

from __future__ import annotations

import json
from decimal import Decimal, localcontext
from itertools import pairwise
from math import inf, isinf, nextafter
from operator import ge, gt, le, lt
from typing import get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from runtime.grammar.emit import schema_grammar
from runtime.grammar.keywords import number
from runtime.grammar.limits import Limits
from runtime.grammar.nodes import Number
from runtime.grammar.numbers import integers, numbers
from runtime.grammar.regular import NOTHING, Regex, fullmatch
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import Toolkit

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
_INSIDE = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
LOWS, HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def valid_as_parsed(schema: str, text: str) -> bool:
    """Both read by `json.loads` as it stands: doubles where there is a fraction."""
    return bool(jsonschema.Draft202012Validator(json.loads(schema)).is_valid(json.loads(text)))


def regex_of(schema: str) -> Regex:
    node = number(Limits().parse(schema, "json_schema"), "", integer=False)
    assert isinstance(node, Number)
    return numbers(node.low, node.high)


def written(value: Decimal) -> str:
    return format(value, "f")


@st.composite
def bounds(draw: st.DrawFn) -> Decimal:
    """Of every magnitude and length; often powers of ten and of two and their neighbours."""
    kind = draw(st.integers(0, 3))
    sign = draw(st.sampled_from((1, -1)))
    if kind == 0:
        value = Decimal(10) ** draw(st.integers(-12, 25))
    elif kind == 1:
        value = Decimal(2 ** draw(st.integers(0, 80)) + draw(st.integers(-3, 3)))
    elif kind == 2:
        value = Decimal(repr(draw(st.floats(1e-12, 1e25)))).normalize()
    else:
        value = Decimal(draw(st.integers(0, 10**20))).scaleb(-draw(st.integers(0, 20)))
    return value * sign


@st.composite
def texts_near(draw: st.DrawFn, value: Decimal) -> str:
    """Decimals around a value: some steps in some place, or around a double next to it or the middle between two."""
    steps, at = draw(st.integers(-12, 12)), draw(st.integers(0, 25))
    other = nextafter(float(value), draw(st.sampled_from((inf, -inf))))
    places, rounding = draw(st.integers(0, 26)), draw(st.sampled_from(("ROUND_FLOOR", "ROUND_CEILING")))
    with localcontext(prec=300):
        near = (
            value + Decimal(steps).scaleb(-at),
            Decimal(other),
            (Decimal(float(value)) + Decimal(other)) / 2,
        )[draw(st.integers(0, 2))]
        return written(near.quantize(Decimal(1).scaleb(-places), rounding=rounding))


def literal(value: Decimal, as_float: bool) -> str:
    return repr(float(value)) if as_float else written(value)


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_what_is_accepted_next_to_a_bound_is_inside_as_a_double(data: st.DataObject) -> None:
    value = data.draw(bounds())
    keyword = data.draw(st.sampled_from(LOWS + HIGHS))
    schema = f'{{"type": "number", "{keyword}": {literal(value, data.draw(st.booleans()))}}}'
    regex = regex_of(schema)
    for text in data.draw(st.lists(texts_near(value), min_size=8, max_size=8)):
        if fullmatch(regex, text):
            assert valid_as_parsed(schema, text), (schema, text)
            assert fits(schema, text), (schema, text)
            only_doubles = jsonschema.Draft202012Validator({"type": "number", keyword: float(value)})
            exact = "." not in text and abs(value) >= 2**53  # an integer, which is none of the doubles
            assert exact or only_doubles.is_valid(float(text)), (schema, text)


def fits(schema: str, text: str) -> bool:
    """On exact decimals."""
    return all(_INSIDE[key](Decimal(text), value) for key, value in _ends(schema).items())


def _ends(schema: str) -> dict[str, Decimal]:
    return {key: Decimal(v) for key, v in json.loads(schema, parse_float=Decimal).items() if key in _INSIDE}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nothing_else_is_lost_next_to_a_bound(data: st.DataObject) -> None:
    """A text of few enough places is left out only where a reader with doubles would see it outside."""
    value = data.draw(bounds().filter(lambda v: abs(v) < 2**53))
    keyword = data.draw(st.sampled_from(LOWS + HIGHS))
    schema = f'{{"type": "number", "{keyword}": {written(value)}}}'
    regex, places = regex_of(schema), 12 + len(written(value).partition(".")[2].rstrip("0"))
    for text in data.draw(st.lists(texts_near(value), min_size=8, max_size=8)):
        if len(text.partition(".")[2]) > min(places, 12) or text.startswith("-0") or not fits(schema, text):
            continue
        as_doubles = {"type": "number", keyword: float(value)}
        inside = jsonschema.Draft202012Validator(as_doubles).is_valid(float(text))
        assert fullmatch(regex, text) == inside, (schema, text)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_between_two_bounds(data: st.DataObject) -> None:
    low, width = data.draw(bounds()), data.draw(bounds())
    with localcontext(prec=100):
        high = low + abs(width) if data.draw(st.booleans()) else Decimal(repr(nextafter(float(low), inf)))
    lower, upper = data.draw(st.sampled_from(LOWS)), data.draw(st.sampled_from(HIGHS))
    schema = f'{{"type": "number", "{lower}": {written(low)}, "{upper}": {written(high)}}}'
    try:
        regex = regex_of(schema)
    except InvalidRequest:
        return  # too many digits
    near = data.draw(st.lists(texts_near(low), min_size=4, max_size=4))
    for text in [*near, *data.draw(st.lists(texts_near(high), min_size=4, max_size=4))]:
        if fullmatch(regex, text):
            assert valid_as_parsed(schema, text), (schema, text)
    for end in (low, high):
        if lower == "minimum" and upper == "maximum" and low <= high and abs(end) < 2**53:
            assert fullmatch(regex, written(end)), schema


REPORTED = [
    ('{"type": "number", "exclusiveMaximum": 100000}', "99999.999999999999", "99999.99999999999"),
    ('{"type": "number", "exclusiveMaximum": 1e10}', "9999999999.999999999", "9999999999.99999"),
    ('{"type": "number", "exclusiveMinimum": -100000}', "-99999.999999999999", "-99999.99999999999"),
    (
        '{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000}',
        "999999.999999999999",
        "999999.9999999999",
    ),
    ('{"type": "number", "exclusiveMinimum": 0.123456789012345}', "0.1234567890123450001", "0.12345678901234501"),
    ('{"type": "number", "exclusiveMinimum": 0}', "0.000000000000", "0.000000000001"),
    ('{"type": "number", "minimum": 9007199254740993}', "9007199254740993.0", "9007199254740993.5"),
    ('{"type": "integer", "maximum": 1e23}', "99999999999999999999999", "99999999999999991611392"),
]


@pytest.mark.parametrize(("schema", "rounded", "apart"), REPORTED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_is_rounded_onto_the_bound(
    kit: Toolkit, backend: BackendName, schema: str, rounded: str, apart: str
) -> None:
    assert not valid_as_parsed(schema, rounded)
    assert valid_as_parsed(schema, apart)
    compiled = kit.compile(GrammarSpec(kind="json_schema", spec=schema), backend)
    assert not kit.takes(compiled, rounded)
    assert kit.takes(compiled, apart)


@pytest.mark.parametrize("schema", [row[0] for row in REPORTED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_walks_stay_inside(kit: Toolkit, backend: BackendName, schema: str) -> None:
    compiled = kit.compile(GrammarSpec(kind="json_schema", spec=schema), backend)
    for seed in range(8):
        text = kit.random_text(compiled, seed)
        assert text is None or isinf(float(text)) or valid_as_parsed(schema, text), text


def test_integers_between_two_doubles_are_left() -> None:
    """Readers that have integers see it inside; there is nothing else to write."""
    for low, high in pairwise((2**53, 2**53 + 2, 2**53 + 4)):
        text = f'{{"type": "number", "exclusiveMinimum": {low}, "exclusiveMaximum": {high}}}'
        assert fullmatch(regex_of(text), str(low + 1))
        assert valid_as_parsed(text, str(low + 1))
    equal = '{"type": "number", "minimum": 9007199254740993, "maximum": 9007199254740993}'
    assert fullmatch(regex_of(equal), "9007199254740993")
    assert not fullmatch(regex_of(equal), "9007199254740993.0")
    assert integers(None, None) != NOTHING


def test_multiples_too_fine_for_a_strict_bound_are_refused() -> None:
    """9999999999.9999999999 would be parsed as the bound."""
    fine = '{"multipleOf": 1e-10, "exclusiveMaximum": 1e10}'
    for schema in (fine, '{"allOf": [{"multipleOf": 1e-10}, {"exclusiveMaximum": 1e10}]}'):
        with pytest.raises(InvalidRequest, match="'/multipleOf': multipleOf beside an exclusive bound"):
            schema_grammar(Limits().parse(schema.replace("{", '{"type": "number", ', 1), "json_schema"), "fixed")
    for schema in (fine.replace("1e-10", "0.001"), fine.replace("exclusiveM", "m"), fine.replace("1e10", "10")):
        assert schema_grammar(Limits().parse(schema.replace("{", '{"type": "number", ', 1), "json_schema"), "fixed")


def test_such_multiples_are_refused_where_only_merging_brings_them_together() -> None:
    parts = ('{"properties": {"a": {"multipleOf": 1e-10}}}', '{"properties": {"a": {"exclusiveMaximum": 1e10}}}')
    schema = json.loads(f'{{"allOf": [{", ".join(parts)}]}}', parse_float=Decimal)
    with pytest.raises(InvalidRequest, match="multipleOf beside an exclusive bound"):
        schema_grammar(schema, "fixed")


def test_no_double_between_the_bounds_is_a_400() -> None:
    schema = {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": nextafter(0.1, inf)}
    with pytest.raises(InvalidRequest, match="no value can match"):
        schema_grammar(json.loads(json.dumps(schema), parse_float=Decimal), "fixed")
