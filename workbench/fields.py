"""Whether the values of a dataclass's fields are of the types that it declares.

One check for settings and sampling parameters, so that `n="abc"` is refused by name where it is
given, not where it is used. What it does not do: judge ranges, which are each class's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from workbench.errors import ConfigError

_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


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
        if get_origin(member) is tuple and _is_list(given):
            return tuple(_fitted(each, get_args(member)[0]) for each in given)
        if member is int and isinstance(given, Integral) and not isinstance(given, bool):
            return int(given)
        if member is float and isinstance(given, Real) and not isinstance(given, bool):
            return float(given)
        if member in (bool, str, NoneType) and isinstance(given, member):
            return given
    raise TypeError


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)


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
