"""The size of modules, the folders of the repository, and who may use which part of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "ppdsl").rglob("*.py"))

MODULE_LINES = 350
INIT_LINES = 30
# Longer than the limit, each with the reason why it is one idea.
LONG: dict[str, str] = {
    "ppdsl/__init__.py": "lists all public names, and loads those that need torch on first use",
}

TOP_LEVEL = {
    ".ci",
    ".editorconfig",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "docs",
    "examples",
    "grammar",
    "ppdsl",
    "pyproject.toml",
    "tests",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_is_short_or_its_length_has_a_reason(path: Path) -> None:
    limit = INIT_LINES if path.name == "__init__.py" else MODULE_LINES
    if relative(path) not in LONG:
        assert line_count(path) <= limit, f"{relative(path)}: look for the second idea"


def test_every_exception_to_the_length_is_still_needed() -> None:
    for name in LONG:
        limit = INIT_LINES if name.endswith("__init__.py") else MODULE_LINES
        assert line_count(ROOT / name) > limit, f"{name} is short now: take it off the list"


def test_the_root_holds_what_it_should() -> None:
    git = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if git.returncode != 0:
        pytest.skip("not a git checkout with a commit")
    assert set(git.stdout.split()) <= TOP_LEVEL


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_compat_module_uses_private_parts_of_torch(path: Path) -> None:
    if relative(path) == "ppdsl/recording/compat.py":
        pytest.skip("the one place for them")
    assert private_torch_names(path.read_text(encoding="utf-8")) == []


def private_torch_names(source: str) -> list[str]:
    """Return the private names of torch that a module imports or reaches through the name `torch`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if is_torch(module):
                found += [f"{module}.{name.name}" for name in names if is_private(f"{module}.{name.name}")]
            case ast.Import(names=names):
                found += [name.name for name in names if is_torch(name.name) and is_private(name.name)]
            case ast.Attribute() if is_torch(dotted := attribute_path(node)) and node.attr.startswith("_"):
                found += [dotted] if is_private(dotted) else []
    return found


def is_torch(dotted: str) -> bool:
    return dotted.partition(".")[0] == "torch"


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def attribute_path(node: ast.expr) -> str:
    """Return ``a.b.c`` for such an expression, and "" for any other."""
    match node:
        case ast.Attribute(value=value, attr=attr):
            return f"{inner}.{attr}" if (inner := attribute_path(value)) else ""
        case ast.Name(id=name):
            return name
    return ""


def test_private_names_are_found_in_every_form() -> None:
    source = """
import torch._dynamo
from torch.utils import _pytree
from torch.utils._pytree import tree_map
from torch import nn
torch._C._log_api_usage_once("x")
torch.nn.Module.__call__
self._torch
"""
    assert sorted(private_torch_names(source)) == [
        "torch._C",
        "torch._C._log_api_usage_once",
        "torch._dynamo",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_map",
    ]


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_ppdsl_loads_neither_torch_nor_rich() -> None:
    output = run_python("import ppdsl, sys; print(*{'torch', 'rich', 'numpy', 'networkx'}.intersection(sys.modules))")
    assert output == "\n"


@pytest.mark.parametrize("package", ["graph", "plan", "schedule", "simulation", "spec"])
def test_the_ground_floor_loads_no_torch(package: str) -> None:
    source = f"""
import importlib, pkgutil, sys
import ppdsl.{package} as package
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(found.name)
print("torch" in sys.modules)
"""
    assert run_python(source) == "False\n"


def test_the_first_use_of_record_loads_torch() -> None:
    assert run_python("import ppdsl, sys; ppdsl.record; print('torch' in sys.modules)") == "True\n"
