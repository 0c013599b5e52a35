"""Selections: names, indices, slices, globs, regular expressions, classes, differences, calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.outline import ModelOutline
from ppdsl.spec.modules import ModuleTree
from ppdsl.spec.select import Kind, Picked, Selector, selection_text
from tests.spec.outlines import Net, chain, sel


def pick(text: str, outline: ModelOutline) -> tuple[Picked, Selector]:
    selector = Selector(ModuleTree.of(outline))
    return selector.pick(sel(text)), selector


def names(text: str, outline: ModelOutline) -> list[str]:
    picked, selector = pick(text, outline)
    assert not selector.findings
    return list(picked.modules)


def aliased() -> ModelOutline:
    net = Net()
    net.module("shared", "Embedding", 4, aliases=("encoder.embed", "decoder.embed"))
    net.module("encoder", "Stack")
    net.module("decoder", "Stack")
    net.run("shared")
    return net.outline()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lm_head", ["lm_head"]),
        ("transformer.h[0]", ["transformer.h.0"]),
        ("transformer.h[-1]", ["transformer.h.3"]),
        ("transformer.h[1:3]", ["transformer.h.1", "transformer.h.2"]),
        ("transformer.h[2:]", ["transformer.h.2", "transformer.h.3"]),
        ("transformer.h[:-3]", ["transformer.h.0"]),
        ("transformer.h[1:3].attn", ["transformer.h.1.attn", "transformer.h.2.attn"]),
        ("transformer.h", ["transformer.h"]),
        ("transformer.h[*]", [f"transformer.h.{at}" for at in range(4)]),
        ("transformer.*", ["transformer.wte", "transformer.h", "transformer.ln_f"]),
        ("transformer.**", ["transformer"]),
        ("**", ["transformer", "lm_head"]),
        ("**.mlp", [f"transformer.h.{at}.mlp" for at in range(4)]),
        ("/.*\\.[02]/", ["transformer.h.0", "transformer.h.2"]),
        ("type(Block)", [f"transformer.h.{at}" for at in range(4)]),
        ("transformer.h[*] - transformer.h[1:3]", ["transformer.h.0", "transformer.h.3"]),
        ("transformer.h[*] - transformer.h[0] - transformer.h[2]", ["transformer.h.1", "transformer.h.3"]),
    ],
)
def test_a_selection_names_modules(text: str, found: list[str]) -> None:
    assert names(text, chain(4)) == found


def test_a_path_may_name_a_parameter() -> None:
    picked, _ = pick("transformer.ln_f.weight", chain(2))
    assert (picked.modules, picked.parameters) == ((), ("transformer.ln_f.weight",))


def test_the_second_name_of_a_parameter_is_the_same_parameter() -> None:
    assert pick("lm_head.weight", chain(2))[0].parameters == ("transformer.wte.weight",)


def test_all_names_of_a_module_object_name_one_module() -> None:
    outline = aliased()
    assert names("encoder.embed", outline) == names("decoder.embed", outline) == names("shared", outline) == ["shared"]


def test_taking_away_an_inner_module_leaves_a_hole() -> None:
    picked, _ = pick("transformer - transformer.h[1]", chain(2))
    assert (picked.modules, picked.holes) == (("transformer",), {"transformer.h.1"})


def test_what_a_difference_takes_away_twice_stays() -> None:
    picked, _ = pick("transformer.h[*]", chain(3))
    inner = sel("transformer.h[*] - transformer.h[1]")
    outer = type(inner)(sel("transformer.h[*]"), inner, inner.span)
    assert Selector(ModuleTree.of(chain(3))).pick(outer).modules == ("transformer.h.1",)
    assert selection_text(outer) == "transformer.h[*] - (transformer.h[*] - transformer.h[1])"
    assert len(picked.modules) == 3


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("lm_head", Kind.EXPLICIT),
        ("transformer.h[0:2]", Kind.EXPLICIT),
        ("transformer.h[*]", Kind.PATTERN),
        ("transformer.*", Kind.PATTERN),
        ("type(Block)", Kind.PATTERN),
        ("call(lm_head, 0)", Kind.CALL),
    ],
)
def test_how_exactly_a_selection_names(text: str, kind: Kind) -> None:
    assert pick(text, chain(2))[0].kind is kind


@given(size=st.integers(1, 6), start=st.none() | st.integers(-8, 8), stop=st.none() | st.integers(-8, 8))
def test_a_slice_is_pythons_slice_or_an_error(size: int, start: int | None, stop: int | None) -> None:
    text = f"transformer.h[{'' if start is None else start}:{'' if stop is None else stop}]"
    picked, selector = pick(text, chain(size))
    inside = all(bound is None or -size <= bound <= size for bound in (start, stop))
    expected = [f"transformer.h.{at}" for at in range(size)[start:stop]]
    assert list(picked.modules) == (expected if inside else [])
    assert bool(selector.findings) == (not inside or not expected)


@given(size=st.integers(1, 6), index=st.integers(-8, 8))
def test_an_index_is_pythons_index_or_an_error(size: int, index: int) -> None:
    picked, selector = pick(f"transformer.h[{index}]", chain(size))
    try:
        expected = (f"transformer.h.{range(size)[index]}",)
    except IndexError:
        expected = ()
        assert "`transformer.h` has" in selector.findings[0].labels[0].text
    assert picked.modules == expected


def test_elements_with_gaps_are_named_by_their_numbers() -> None:
    net = Net()
    for number in (1, 4, 7):
        net.run(net.module(f"parts.{number}", count=1))
    outline = net.outline()
    assert names("parts[4]", outline) == ["parts.4"]
    assert names("parts[-1]", outline) == ["parts.7"]
    assert names("parts[2:8]", outline) == ["parts.4", "parts.7"]
    _, selector = pick("parts[3]", outline)
    assert selector.findings[0].labels[0].text == "`parts` has 3 elements: 1, 4, 7"
