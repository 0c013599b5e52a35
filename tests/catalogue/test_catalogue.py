"""The list of findings is complete, true, and what the page shows."""

from __future__ import annotations

import os

import pytest

from tests.catalogue.codes import codes_in_source
from tests.catalogue.page import PAGE, page_text
from tests.catalogue.running import Example, read_examples, said_by, write_examples
from tests.catalogue.specs import spec_examples

WRITE = os.environ.get("GOLDEN") == "write"
SHOWN = [example for example in read_examples() if example.left_out is None]


@pytest.fixture(scope="module", autouse=WRITE)
def _written() -> None:
    write_examples(read_examples())
    PAGE.write_text(page_text(), encoding="utf-8")


def test_every_code_in_the_source_is_listed_and_no_other() -> None:
    own = [example.code for example in read_examples()]
    assert own == sorted(set(own))
    listed = {*own, *spec_examples()}
    source = codes_in_source()
    assert {code: file for code, file in source.items() if code not in listed} == {}
    assert sorted(listed - set(source)) == []


@pytest.mark.parametrize("example", SHOWN, ids=lambda example: example.code)
def test_an_example_says_what_the_list_says(example: Example) -> None:
    said = said_by(example)
    assert f"[{example.code}]" in said
    if not WRITE:
        assert said == example.said


def test_the_page_shows_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text()
