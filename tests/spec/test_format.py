"""Laws of the formatter: what it writes says the same, comments too, and writing it again changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import SpecError
from ppdsl.spec import nodes
from ppdsl.spec.format import format_spec
from ppdsl.spec.parse import parse
from tests.spec import trees
from tests.spec.catalogue import VALID


def without_first_blank(items: tuple[nodes.Item, ...]) -> tuple[nodes.Item, ...]:
    """Nothing stands before the first item, so no blank line does."""
    if not items:
        return items
    return (replace(items[0], notes=replace(items[0].notes, blank=False)), *items[1:])


@st.composite
def files(draw: Any) -> nodes.SpecFile:
    before = draw(st.lists(trees.outer_items, max_size=3))
    pipeline = draw(trees.pipelines)
    items = (*before, replace(pipeline, items=without_first_blank(pipeline.items)))
    version = draw(st.none() | st.just(1))
    if version is None:
        items = without_first_blank(items)
        return nodes.SpecFile(None, items, nodes.Notes(closing=draw(trees.leading)))
    notes = nodes.Notes(draw(trees.leading), draw(st.just("") | trees.comments), closing=draw(trees.leading))
    return nodes.SpecFile(1, items, notes)


@given(files())
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_is_formatted_says_the_same_and_formatting_it_again_changes_nothing(tree: nodes.SpecFile) -> None:
    text = format_spec(tree)
    parsed = parse(text)
    assert parsed.diagnostics == ()
    assert parsed.tree == tree
    assert format_spec(parsed.tree) == text


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_valid_spec_keeps_its_meaning_and_every_comment(path: Path) -> None:
    before = path.read_text(encoding="utf-8")
    after = format_spec(before)
    assert parse(after).tree == parse(before).tree
    assert format_spec(after) == after
    assert after.count("#") == before.count("#")


@given(
    st.lists(
        st.sampled_from("stage a b { } # x\n,@ 0 1 = + ( ) [ ] . : memory 2GiB pipeline net".split(" ")), max_size=40
    )
)
@example(["pipeline", "net", "{", "# x\n", "stage", "a", "{", "# x\n", "b", "# x\n", ",", "# x\n", "}", "# x\n", "}"])
@settings(deadline=None, max_examples=300)
def test_comments_anywhere_survive(words: list[str]) -> None:
    text = " ".join(words)
    parsed = parse(text)
    if not parsed.diagnostics:
        after = format_spec(text)
        assert after.count("# x") == text.count("# x")
        assert parse(after).tree == parsed.tree
        assert format_spec(after) == after


def test_a_text_that_cannot_be_parsed_is_not_formatted() -> None:
    with pytest.raises(SpecError, match="Nothing begins with `stge`"):
        format_spec("pipeline net { stge a { b } }")
