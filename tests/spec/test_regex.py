"""Regular expressions of specs: as Python's where both know a pattern, and never slow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.spec.regex import RegexError, compile_regex
from tests.effort import calls_of

letters = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", "[a-c]", r"\d", r"\w", r"[\d_]", "(?:a|b)"])
patterns = st.recursive(
    letters,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.tuples(inner, inner).map("|".join)
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "{,2}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        )
    ),
    max_leaves=6,
)


@given(patterns, st.text("abc.1_", max_size=8))
@settings(deadline=None, max_examples=500)
def test_a_pattern_means_what_it_means_in_python(pattern: str, text: str) -> None:
    assert compile_regex(pattern).fullmatch(text) == (re.fullmatch(pattern, text) is not None)
    assert compile_regex(pattern).search(text) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*a){12}b", ".*.*.*.*.*b", "(a?){40}a{40}b", "((a*)*)*b"]
)
def test_patterns_that_make_others_hang_end_at_once(pattern: str) -> None:
    # A search that goes back would take longer than the sun shines.
    compiled = compile_regex(pattern)
    assert not compiled.fullmatch("a" * 2000)
    short, long = (calls_of(lambda n=n: compiled.fullmatch("a" * n)) for n in (500, 2000))
    assert long < 6 * short


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", "Only plain groups"), ("(?P<n>a)", "Only plain groups"), ("(?i)a", "Only plain groups"),
        (r"(a)\1", "is not allowed"), (r"\bword", "is not allowed"), ("^a", "leave `^` and `$` out"),
        ("a*?", "repeated"),
        ("a**", "repeated"), ("*a", "nothing before"), ("a{3,2}", "backwards"), ("[b-a]", "backwards"),
        ("(a", "never closed"),
        ("a)", "closes no group"), ("[a", "never closed"), ("a{x}", "A repeat is written"),
        ("(a{99}){99}", "too large"),
        ("a" * 2000, "letters"), ("(" * 60 + ")" * 60, "nested"), ("a\\", "is not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched_in_linear_time_or_is_no_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RegexError, match=re.escape(message)):
        compile_regex(pattern)


@given(st.text("ab()[]{}|*+?\\^$-,1.", max_size=14))
@settings(deadline=None, max_examples=500)
def test_any_text_is_a_pattern_or_refused(pattern: str) -> None:
    try:
        compiled = compile_regex(pattern)
    except RegexError as error:
        offset = error.offset
    else:
        offset = int(compiled.fullmatch("ab1"))
    assert 0 <= offset <= len(pattern) + 1
