"""What a file says of a model, one setting at a time: of the kind that it must be, or refused.

For a config.json and for a GGUF file's metadata, so that a damaged value is named where it is read,
not where it is used. A setting that is null counts as absent. What it does not do: say what a
setting means, or which of the possible values a model may have (spec.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError

LARGEST = 2**31 - 1  # no size and no token id of a model comes near it
_LARGEST_NUMBER = 3.4e38  # what float32 holds, in which most models compute


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by name, and the file (`where`) that errors name.

    Each reader raises ModelError for a value of another kind, and for one that is absent and has no
    default.
    """

    given: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.given, Mapping):
            raise ModelError(
                f"{self.where} holds {reprlib.repr(self.given)}; allowed: an object of settings."
            )

    def has(self, name: str) -> bool:
        """Whether a setting has a value."""
        return self.given.get(name) is not None

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, `least` or more; true is no number, 4.0 is not whole."""
        allowed = f"a whole number from {least} to {LARGEST:,}"
        found = self._found(name, default, allowed)
        if type(found) is not int or not least <= found <= LARGEST:
            raise self.refusal(name, found, allowed)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0, neither infinite nor undefined."""
        allowed = f"a number above 0, at most {_LARGEST_NUMBER}"
        found = self._found(name, default, allowed)
        if type(found) not in (int, float) or not 0 < found <= _LARGEST_NUMBER:
            raise self.refusal(name, found, allowed)
        return float(found)

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        found = self._found(name, default, "a text")
        if not isinstance(found, str):
            raise self.refusal(name, found, "a text")
        return found

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false; 1 is neither."""
        found = self._found(name, default, "true or false")
        if not isinstance(found, bool):
            raise self.refusal(name, found, "true or false")
        return found

    def part(self, name: str) -> Settings:
        """The settings within one, none where it is absent."""
        found = self._found(name, {}, "")
        if not isinstance(found, Mapping):
            raise self.refusal(name, found, "an object of settings, or null")
        return Settings(found, f"{self.where}: {name}")

    def refusal(self, name: str, found: Any, allowed: str) -> ModelError:
        """The error for a value that is not allowed."""
        count = f" ({len(found)} values)" if isinstance(found, list) else ""
        return ModelError(
            f"{self.where} says {name} = {reprlib.repr(found)}{count}; allowed: {allowed}."
        )

    def _found(self, name: str, default: Any, allowed: str) -> Any:
        found = self.given.get(name)
        if found is None:
            found = default
        if found is None:
            raise ModelError(f"{self.where} lacks {name!r}; needed: {allowed}.")
        return found
