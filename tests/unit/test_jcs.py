"""The canonical form of arguments: RFC 8785, and what has none is refused."""

from __future__ import annotations

import json
import math
import random
import unicodedata
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol import canonical, jcs
from protocol.errors import BadJson, NotCanonical

#: RFC 8785, 3.2.2 and 3.2.3, and appendix B.
RFC_SAMPLE = r"""{
    "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
    "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
    "literals": [null, true, false]
}"""
RFC_RESULT = (
    '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
    '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
)
RFC_KEYS = r"""{
    "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
    "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control", "\u00f6": "Latin Small Letter O With Diaeresis"
}"""
RFC_KEY_ORDER = [
    "Carriage Return", "One", "Control", "Latin Small Letter O With Diaeresis", "Euro Sign", "Emoji: Grinning Face",
    "Hebrew Letter Dalet With Dagesh",
]  # fmt: skip
RFC_NUMBERS = [
    (5e-324, "5e-324"),
    (-5e-324, "-5e-324"),
    (1.7976931348623157e308, "1.7976931348623157e+308"),
    (9007199254740992.0 - 1, "9007199254740991"),
    (295147905179352830000.0, "295147905179352830000"),
    (9.999999999999997e22, "9.999999999999997e+22"),
    (1e23, "1e+23"),
    (1.0000000000000001e23, "1.0000000000000001e+23"),
    (999999999999999700000.0, "999999999999999700000"),
    (1e21, "1e+21"),
    (9.999999999999997e-7, "9.999999999999997e-7"),
    (0.000001, "0.000001"),
    (333333333.3333332, "333333333.3333332"),
    (-0.0, "0"),
]


def parsed(text: str) -> Any:
    return canonical.parse(text.encode("utf-8"))


@pytest.mark.effect_case(43)
def test_the_samples_of_the_rfc() -> None:
    assert jcs.encode(parsed(RFC_SAMPLE)).decode("utf-8") == RFC_RESULT
    assert list(json.loads(jcs.encode(parsed(RFC_KEYS))).values()) == RFC_KEY_ORDER


@pytest.mark.effect_case(44)
@pytest.mark.parametrize(("value", "text"), RFC_NUMBERS)
def test_numbers_are_written_as_the_rfc_writes_them(value: float, text: str) -> None:
    assert jcs.encode(value).decode("ascii") == text


@pytest.mark.effect_case(43)
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"2":1,"10":2}', '{"10":2,"2":1}'),
        ('{"b":{"d":1,"c":[{"z":1,"a":2}]},"a":0}', '{"a":0,"b":{"c":[{"a":2,"z":1}],"d":1}}'),
        ('{"b":1,"__proto__":{"x":1},"a":2}', '{"__proto__":{"x":1},"a":2,"b":1}'),
        # U+1F600 is D83D DE00 in UTF-16, so it comes before U+FB33, though its code point is higher.
        ('{"\\ufb33":1,"\\ud83d\\ude00":2}', '{"\U0001f600":2,"\ufb33":1}'),
        ('{"\\uffff":1,"\\ud800\\udc00":2}', '{"\U00010000":2,"\uffff":1}'),
        ('{"":1,"\\u0000":2}', '{"":1,"\\u0000":2}'),
        ("[]", "[]"),
        ("{}", "{}"),
    ],
)
def test_keys_are_ordered_by_their_utf_16_units_at_every_level(document: str, expected: str) -> None:
    assert jcs.encode(parsed(document)).decode("utf-8") == expected


SAME = [("1", "1.0"), ("1", "1e0"), ("100", "1E2"), ("-0", "0"), ("-0.0", "0"), ("0.1", "1e-1"), ('"\\u0041"', '"A"')]
OTHER = [("true", "1"), ("false", "0"), ("null", "0"), ('"1"', "1"), ('""', "null"), ("[1,2]", "[2,1]"), ("[]", "{}")]


@pytest.mark.effect_case(44)
@pytest.mark.parametrize(("one", "other"), SAME)
def test_spellings_of_one_value_have_one_digest(one: str, other: str) -> None:
    assert jcs.digest(parsed(one)) == jcs.digest(parsed(other))


@pytest.mark.effect_case(44)
@pytest.mark.parametrize(("one", "other"), OTHER)
def test_different_values_have_different_digests(one: str, other: str) -> None:
    assert jcs.digest(parsed(one)) != jcs.digest(parsed(other))


@pytest.mark.effect_case(44)
def test_text_is_not_normalised() -> None:
    composed = unicodedata.normalize("NFC", "e\u0301")
    assert jcs.digest({"name": composed}) != jcs.digest({"name": "e\u0301"})


# --- what has no canonical form --------------------------------------------------------------------------------------


@pytest.mark.effect_case(45)
@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, -math.inf, 2**53, -(2**53), b"bytes", bytearray(b"x"), {1, 2}, frozenset(), Decimal("1"),
        object(), 1j, "\ud800", "a\udfffb", {1: "a"}, {None: 1}, {b"k": 1}, {"\udc00": 1}, {True: 1},
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [1, {"b": value}]}], ids=["bare", "deep"])
def test_what_is_no_json_value_is_refused(value: Any, wrap: Any) -> None:
    with pytest.raises(NotCanonical):
        jcs.encode(wrap(value))


@pytest.mark.effect_case(45)
def test_a_refusal_says_where() -> None:
    with pytest.raises(NotCanonical) as refused:
        jcs.encode({"items": [{"price": 1.0}, {"price": math.nan}]})
    assert "$['items'][1]['price']" in refused.value.detail


@pytest.mark.effect_case(45)
def test_the_safe_integers_are_the_bounds() -> None:
    assert jcs.encode([2**53 - 1, -(2**53) + 1]) == b"[9007199254740991,-9007199254740991]"


@pytest.mark.effect_case(45)
@pytest.mark.parametrize("document", ['{"a":1,"a":1}', '{"a":{"b":1,"b":2}}', '{"a":1,"\\u0061":2}', "NaN", "[1e999]"])
def test_what_only_the_text_shows_is_refused_by_the_parser(document: str) -> None:
    with pytest.raises(BadJson):
        parsed(document)


@pytest.mark.effect_case(45)
def test_nesting_has_a_bound() -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    assert jcs.encode(nested(jcs.MAX_DEPTH)).startswith(b"[")
    with pytest.raises(NotCanonical, match="deeper"):
        jcs.encode(nested(jcs.MAX_DEPTH + 1))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotCanonical):
        jcs.encode(loop)


# --- ten thousand values ---------------------------------------------------------------------------------------------

_SAFE = st.integers(-(2**53) + 1, 2**53 - 1)
#: A whole double from 2^53 to 10^21 is written in digits, which a strict reader takes for an integer and refuses.
_FLOATS = st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda value: not (value.is_integer() and 2**53 <= abs(value) < 1e21)
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | _SAFE | _FLOATS | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=8,
)


def respelled(value: Any, dice: random.Random) -> str:
    """JSON text of the same value: other order of keys, other spelling of numbers and characters, other spaces."""
    gap = dice.choice(("", " ", "\n\t"))
    if isinstance(value, dict):
        items = list(value.items())
        dice.shuffle(items)
        pairs = [f"{_text(key, dice)}{gap}:{gap}{respelled(item, dice)}" for key, item in items]
        return "{" + gap + f"{gap},{gap}".join(pairs) + gap + "}"
    if isinstance(value, list):
        return "[" + gap + f"{gap},{gap}".join(respelled(item, dice) for item in value) + gap + "]"
    if isinstance(value, str):
        return _text(value, dice)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return _number(value, dice)


def _text(text: str, dice: random.Random) -> str:
    return json.dumps(text, ensure_ascii=dice.random() < 0.5)


def _number(value: float, dice: random.Random) -> str:
    """An integer may be written with a fraction or an exponent, and zero with a sign."""
    if value == 0:
        return dice.choice(("0", "-0", "0.0", "-0.0", "0e5"))
    spellings = [repr(value), f"{Decimal(repr(value)):e}", f"{Decimal(repr(value)):E}"]
    if isinstance(value, int):
        spellings += [f"{value}.0", f"{value}0e-1", f"{value}e0"]
    return dice.choice(spellings)


#: Values to an example: what Hypothesis does for an example costs more than a value.
BATCH = 20


@pytest.mark.effect_case(43)
@pytest.mark.effect_case(44)
@pytest.mark.timeout(300)
@settings(max_examples=10_000 // BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(values=st.lists(_VALUES, min_size=BATCH, max_size=BATCH), seed=st.integers(0, 2**32))
def test_no_order_and_no_spelling_changes_a_digest(values: list[Any], seed: int) -> None:
    dice = random.Random(seed)
    for value in values:
        digest = jcs.digest(value)
        assert jcs.digest(parsed(respelled(value, dice))) == digest
        assert jcs.digest(parsed(jcs.encode(value).decode("utf-8"))) == digest
