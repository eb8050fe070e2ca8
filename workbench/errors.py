"""The errors raised on bad input: each says what was given, what is allowed and what to do.

And the check of a setting's type, so that `n="abc"` is refused by name where it is given. Imported
by every layer, imports nothing. Errors of our own making (a broken invariant) are plain `assert`s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


class WorkbenchError(Exception):
    """The root: `except WorkbenchError` catches all bad input and nothing else."""


class ConfigError(WorkbenchError, ValueError):
    """A setting that is unknown, of the wrong type, or outside what is allowed."""


class ModelError(WorkbenchError):
    """A model that is unknown, incomplete, corrupt, or of an unsupported architecture."""


class PromptError(WorkbenchError, ValueError):
    """A request the engine can never serve: empty, too long, or with unknown token ids."""


class OutOfMemory(WorkbenchError, MemoryError):
    """A budget that leaves a model without blocks for one request of max_model_len."""


class ProblemFileError(WorkbenchError, ValueError):
    """A problem file with a row that cannot be read; the row is named."""


class RunStoreError(WorkbenchError):
    """A run folder that is missing, incomplete or of another schema version."""


class RecordingError(WorkbenchError, ValueError):
    """A recorded search that cannot be read, or does not hold what a replay asks of it."""


class StepError(WorkbenchError, RuntimeError):
    """A forward pass failed; the requests of that step finish with it, the engine goes on.

    rows: of the step's flat batch, those at fault where that is known.
    """

    def __init__(self, message: str, rows: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NotebookError(WorkbenchError, RuntimeError):
    """A notebook stopped at a cell that failed; the cell is named, and what was written by then."""


def nearest(given: str, known: list[str] | tuple[str, ...]) -> str:
    """` Did you mean 'x'?` when a known name is close to the given one, else an empty text."""
    close = get_close_matches(given, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_types(settings: Any) -> None:
    """Puts each field into its declared type, where that loses nothing; ConfigError otherwise.

    Declared are int, float, bool, str, None, tuples of one of them, and unions. A whole number is a
    float too, any iterable but a text is a tuple; true is no number, 4.0 is not whole.
    """
    kind: Any = type(settings)
    for name, declared, exact in _declared(kind):
        given = getattr(settings, name)
        if type(given) not in exact:
            try:
                object.__setattr__(settings, name, _fitted(given, declared))
            except TypeError:
                raise ConfigError(
                    f"{kind.__name__}.{name} is {given!r}; allowed: {_described(declared)}."
                ) from None


@cache
def _declared(cls: type) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Name, declared type, and the types that are taken as they are, of each field."""
    hints = get_type_hints(cls)
    return tuple((f.name, hints[f.name], frozenset(_members(hints[f.name]))) for f in fields(cls))


def _members(declared: Any) -> tuple[Any, ...]:
    return get_args(declared) if isinstance(declared, UnionType) else (declared,)


def _fitted(given: Any, declared: Any) -> Any:
    """The value in the first declared type that takes it. Raises TypeError when none does."""
    for member in _members(declared):
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        if get_origin(member) is tuple and several:
            return tuple(_fitted(each, get_args(member)[0]) for each in given)
        if member is int and isinstance(given, Integral) and not isinstance(given, bool):
            return int(given)
        if member is float and isinstance(given, Real) and not isinstance(given, bool):
            return float(given)
        if member in (bool, str, NoneType) and isinstance(given, member):
            return given
    raise TypeError


def _described(declared: Any) -> str:
    """What a declared type admits, in words."""
    words, members = [], _members(declared)
    for member in members:
        if member is int and float in members:
            continue
        if get_origin(member) is tuple:
            words.append(f"a list of {_MANY[get_args(member)[0]]}")
        else:
            words.append("None" if member is NoneType else _ONE[member])
    return " or ".join(words)
