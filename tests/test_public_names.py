"""`__all__` of every module is what can be imported from it, no more and no less."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import ppdsl

FOUND = sorted(found.name for found in pkgutil.walk_packages(ppdsl.__path__, "ppdsl."))
MODULES = ["ppdsl", *(name for name in FOUND if not name.endswith("__main__"))]


def own_public_names(module: ModuleType) -> set[str]:
    """Classes and functions without a leading underscore that are written in this module."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__name__", None) == name
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_all_names_exactly_the_public_names(name: str) -> None:
    module = importlib.import_module(name)
    promised = getattr(module, "__all__", None)
    if promised is None:
        # A package may leave its names in its modules; then it has none of its own.
        assert hasattr(module, "__path__"), f"{name} has no __all__"
        promised = []
    assert len(promised) == len(set(promised)), f"{name}.__all__ has a name twice"
    missing = [entry for entry in promised if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ promises {missing}"
    forgotten = own_public_names(module) - set(promised)
    assert not forgotten, f"{name}.__all__ lacks {sorted(forgotten)}: add them, or begin their names with an underscore"


def test_dir_shows_what_the_package_promises() -> None:
    assert set(ppdsl.__all__) <= set(dir(ppdsl))


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ppdsl' has no attribute 'pipelines'"):
        getattr(ppdsl, "pipelines")  # noqa: B009 - the type checker knows the name is not there
