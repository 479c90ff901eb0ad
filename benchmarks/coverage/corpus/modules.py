"""The modules of one file of the corpus, with stand-ins for what the file imports and this machine lacks."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from torch import nn

__all__ = ["Case", "CorpusError", "cases_of", "is_stand_in", "projects"]

_PREFIX = "corpus_"
_HELPERS = "_paritybench_helpers"


class CorpusError(Exception):
    """A file of the corpus cannot be imported, or lists no modules."""


@dataclass(frozen=True)
class Case:
    """One module of a project.

    Attributes:
        project: the name of its file.
        index: its place in the file.
        name: the name of its class.
        build: makes the module; raises what the module's own code raises.
        inputs: makes the positional and the keyword arguments of a call.
    """

    project: str
    index: int
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def projects(folder: Path) -> dict[str, Path]:
    """The file of each project in the folder ``generated``, by the project's name."""
    return {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("test_*.py"))}


def cases_of(path: Path) -> list[Case]:
    """Import one file of the corpus and list its modules.

    Raises:
        CorpusError: the file cannot be imported, or lists no modules.
    """
    project = path.stem.removeprefix("test_")
    module = types.ModuleType(_PREFIX + project)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    sys.modules[_HELPERS] = _helpers()
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        exec(compile(path.read_text(errors="replace"), str(path), "exec"), module.__dict__)
        listed = module.TESTCASES
        if not listed:
            raise CorpusError("an empty list")
    except BaseException as error:  # code of others: it may even leave by SystemExit
        raise CorpusError(f"{type(error).__name__}: {str(error)[:100]}") from error
    finally:
        sys.meta_path.remove(finder)
    return [_case(project, index, entry) for index, entry in enumerate(listed)]


def _case(project: str, index: int, listed: Sequence[Any]) -> Case:
    """A case from ``(class, arguments of the class, arguments of a call, ...)``."""
    kind, settings, arguments = listed[:3]

    def build() -> nn.Module:
        args, kwargs = settings()
        made = kind(*args, **kwargs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"a {type(made).__name__}, not a module")
        return made

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments()
        return tuple(args), kwargs

    return Case(project, index, getattr(kind, "__name__", "?"), build, inputs)


def is_stand_in(value: Any) -> bool:
    """Whether a value came from a package that is not installed."""
    return isinstance(value, MagicMock)


class _StandIn(types.ModuleType):
    """A package that is not installed: every attribute is a mock."""

    __path__: list[str] = []  # noqa: RUF012  # what makes it a package for the import system

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "1.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=name)
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for what a file of the corpus imports, after all other finders have found nothing."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        # An installed package that looks for an optional one must go on not to find it.
        asked = frame.f_globals.get("__name__", "").startswith(_PREFIX)
        if asked or isinstance(sys.modules.get(fullname.rpartition(".")[0]), _StandIn):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _DummyBlock(nn.ReLU):
    expansion = 1


class _Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


def _layer(in_features: Any = None, out_features: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
    return nn.Linear(in_features, out_features, **kwargs) if in_features and out_features else _DummyBlock()


def _helpers() -> types.ModuleType:
    """The module that files of the corpus import their test class and their mock objects from."""
    module = types.ModuleType(_HELPERS)
    names = {
        "_mock_config": _Settings,
        "_mock_layer": _layer,
        "patch_functional": lambda: None,
        "_paritybench_base": object,
        "_fails_compile": lambda: lambda test: test,
    }
    vars(module).update(names)
    return module
