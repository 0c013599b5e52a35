"""What valid specs say; and that grammar, keywords, colours and pages speak of the same language."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pygments.token import Error, Keyword, Name

import ppdsl
from ppdsl.report.lexer import PpspecLexer
from ppdsl.schedule.registry import families
from ppdsl.spec.format import format_spec
from ppdsl.spec.keywords import BALANCES, ITEM_WORDS, MEASURES, OPTIONS, OTHER_WORDS, SCHEDULES, SETTINGS
from ppdsl.spec.load import check_spec, load_spec, load_spec_text
from ppdsl.spec.parse import parse
from ppdsl.spec.syntax import TYPED
from tests.spec.catalogue import VALID, partition_of

ROOT = Path(__file__).resolve().parent.parent.parent
GRAMMAR = (ROOT / "grammar" / "ppspec.lark").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^```ppspec\n(.*?)^```$", (ROOT / "grammar" / "README.md").read_text(encoding="utf-8"), re.M | re.S
)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_valid_spec_says_exactly_this(path: Path) -> None:
    assert partition_of(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_there_are_ten_examples() -> None:
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("number", range(1, 11))
def test_an_example_of_the_page_is_valid_and_in_canonical_form(number: int, tmp_path: Path) -> None:
    text = EXAMPLES[number - 1]
    (tmp_path / "base.ppspec").write_text(EXAMPLES[2], encoding="utf-8")
    (tmp_path / "main.ppspec").write_text(text, encoding="utf-8")
    assert check_spec(tmp_path / "main.ppspec").diagnostics == ()
    assert format_spec(text) == text


def test_the_example_that_opens_the_grammar_is_valid(tmp_path: Path) -> None:
    lines = GRAMMAR.splitlines()
    first, last = lines.index("//"), lines.index("//     }")
    text = "".join(f"{line[7:]}\n" for line in lines[first : last + 1])
    (tmp_path / "base.ppspec").write_text("", encoding="utf-8")
    (tmp_path / "main.ppspec").write_text(text, encoding="utf-8")
    assert check_spec(tmp_path / "main.ppspec").diagnostics == ()
    assert [type(item).__name__ for item in parse(text).tree.items] == [
        "ParamNode",
        "LetNode",
        "IncludeNode",
        "PipelineNode",
    ]


# ---------------------------------------------------------------- one language


def terminals() -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)(?:\.\d)?: (.+)$", GRAMMAR, re.M))


def test_the_keywords_are_those_of_the_grammar() -> None:
    words = {match[1] for text in terminals().values() if (match := re.match(r"/([a-z]+)\(\?[!=]", text))}
    policies = {"sync", "colocate"}
    assert words | policies == {*ITEM_WORDS, *OTHER_WORDS}
    assert terminals()["POLICY"] == r"/(sync|colocate)(?!\w)/"


def test_every_terminal_is_shown_as_one_types_it() -> None:
    ignored = {"COMMENT", "SPACE"}
    for name, text in terminals().items():
        if name in ignored:
            continue
        shown = TYPED.get(name, name.lower())
        if text.startswith('"'):
            assert shown == text.strip('"')
        else:
            assert name in TYPED or shown in {*ITEM_WORDS, *OTHER_WORDS}, name


def test_the_names_of_schedules_are_those_of_the_registry() -> None:
    assert set(SCHEDULES) == {*families(), "auto"}


def test_the_editor_colours_the_same_words() -> None:
    colours = json.loads((ROOT / "grammar" / "ppspec.tmLanguage.json").read_text(encoding="utf-8"))
    assert (colours["scopeName"], colours["fileTypes"]) == ("source.ppspec", ["ppspec"])
    lists = {
        pattern.get("name"): set(re.findall(r"(?<=[:|])[a-z0-9_]+(?=[|)])", pattern["match"]))
        for pattern in colours["patterns"]
    }
    selectors = {"type", "call", "rest"}
    assert lists["keyword.control.ppspec"] == set(ITEM_WORDS)
    assert lists["keyword.other.ppspec"] == set(OTHER_WORDS) - selectors
    assert lists["support.function.ppspec"] == selectors
    assert lists["variable.parameter.ppspec"] == {*SETTINGS, *OPTIONS}
    assert lists["support.constant.measure.ppspec"] == {*BALANCES, *MEASURES}
    assert lists["support.constant.schedule.ppspec"] == set(SCHEDULES)
    for pattern in colours["patterns"]:
        re.compile(pattern["match"])


@pytest.mark.parametrize("text", [*EXAMPLES, *(path.read_text(encoding="utf-8") for path in VALID)])
def test_the_lexer_knows_every_word_of_a_valid_spec(text: str) -> None:
    tokens = list(PpspecLexer(stripnl=False, ensurenl=False).get_tokens(text))
    assert "".join(piece for _, piece in tokens) == text
    assert not [piece for kind, piece in tokens if kind in Error]


def test_the_lexer_tells_words_of_the_language_from_names() -> None:
    tokens = {piece: kind for kind, piece in PpspecLexer().get_tokens("stage head @ 0 { model.split, h[0:2] }")}
    assert (tokens["stage"], tokens["head"], tokens["split"]) == (Keyword, Name.Class, Name)


# ---------------------------------------------------------------- loading


def test_the_same_text_has_the_same_digest_and_another_has_another() -> None:
    text = "param n = 1 pipeline net { stage a { h[n] } }"
    first, again = load_spec_text(text), load_spec_text(text)
    assert first.source_digest == again.source_digest
    assert len({first.source_digest, load_spec_text(text, overrides={"n": 2}).source_digest}) == 2


def test_a_warning_does_not_stop_the_work() -> None:
    with pytest.warns(ppdsl.PpdslWarning, match="Parameter `n` is never used"):
        assert load_spec_text("param n = 1 pipeline net { stage a { x } }").name == "net"


# ---------------------------------------------------------------- the grammar is found wherever the package lies

SOURCE = """
import sys; sys.path[:0] = {paths!r}
import ppdsl
from ppdsl.spec.load import load_spec_text
print(load_spec_text("pipeline net {{ stage a {{ x }} }}").name, "torch" in sys.modules, ppdsl.__file__)
"""


def answer(*paths: Path, folder: Path) -> list[str]:
    # `-I` leaves the checkout out of the path, unless it is given; lark comes from the environment.
    command = [sys.executable, "-I", "-c", SOURCE.format(paths=[str(path) for path in paths])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install 'ppdsl[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_an_installed_wheel_finds_its_grammar(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    assert (tmp_path / "site" / "ppdsl" / "grammar" / "ppspec.lark").read_text(encoding="utf-8") == GRAMMAR
    name, torch, place = answer(tmp_path / "site", folder=tmp_path)
    assert (name, torch) == ("net", "False")
    assert Path(place).is_relative_to(tmp_path)


def test_pygments_finds_the_lexer_of_an_installed_wheel_by_name(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    source = f"""
import sys; sys.path.insert(0, {str(tmp_path / "site")!r})
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
print(get_lexer_by_name("ppspec").name, get_lexer_for_filename("llama.ppspec").name, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["ppspec", "ppspec", "False"], done.stderr


def test_a_wheel_that_is_not_unpacked_finds_its_grammar(wheel: Path, tmp_path: Path) -> None:
    name, _, place = answer(wheel, folder=tmp_path)
    assert name == "net"
    assert place.startswith(str(wheel))


def test_a_checkout_finds_its_grammar(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ppdsl", tmp_path / "ppdsl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "grammar", tmp_path / "grammar")
    name, torch, place = answer(tmp_path, folder=tmp_path)
    assert (name, torch) == ("net", "False")
    assert Path(place).is_relative_to(tmp_path)


def test_an_editable_install_finds_the_grammar_of_its_checkout(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ppdsl", tmp_path / "checkout" / "ppdsl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "grammar", tmp_path / "checkout" / "grammar")
    site = tmp_path / "site"
    site.mkdir()
    (site / "_ppdsl.pth").write_text(f"{tmp_path / 'checkout'}\n")  # what an editable install leaves behind
    source = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.insert(0, sys.path.pop())" + SOURCE.format(
        paths=[]
    ).replace("sys.path[:0] = []", "pass")
    done = subprocess.run([sys.executable, "-I", "-c", source], cwd=site, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "net"
    assert Path(done.stdout.split()[2]).is_relative_to(tmp_path / "checkout")


def test_a_damaged_installation_says_so(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ppdsl", tmp_path / "ppdsl", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-I", "-c", SOURCE.format(paths=[str(tmp_path)])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "install ppdsl again" in done.stderr


def test_a_spec_can_be_given_as_a_path_of_any_kind(tmp_path: Path) -> None:
    file = tmp_path / "net.ppspec"
    file.write_text("pipeline net { stage a { x } }")
    assert load_spec(file) == load_spec(str(file))
