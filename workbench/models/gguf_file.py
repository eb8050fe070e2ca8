"""A GGUF file: its metadata, where its tensors lie, and their bytes, mapped and not read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian. A reader of our own because the `gguf` package takes seconds to open a file, this one some
hundredths. What it does not do: say what metadata means (gguf_config.py), or make tensors
(gguf_weights.py).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError
from workbench.models.settings import Settings

# Number in the file -> name, weights in a block, bytes of a block.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
PLAIN = ("F32", "F16", "BF16")  # numbers, each by itself
# Kinds that are not read, for the error to name.
_OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K"}
_OTHERS |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
_OTHERS |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_OTHERS |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}

_NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # struct's letters
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. shape: rows first, as torch has it; start, nbytes: in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile:
    """An open file. metadata: key -> value; tensors: name -> StoredTensor.

    Raises ModelError for a file that is missing, no GGUF, cut short, or holds a kind of weights
    that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}.") from error
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{path} is no GGUF file: it begins with {self._map[:4]!r}.")
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise self._cut_short(f"its header ends early: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def settings(self) -> Settings:
        """The metadata, to be read by kind; errors name the file and the key."""
        return Settings(self.metadata, str(self.path))

    def _cut_short(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is cut short or corrupt ({what}); fetch the model again.")

    def data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, mapped and read-only."""
        tensor = self.tensors[name]
        return self._bytes[tensor.start : tensor.start + tensor.nbytes]

    def release(self) -> None:
        """Gives back the memory of what was read; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all tensors once held: numbers of `itemsize` bytes, quantised ones as stored."""
        return sum(
            math.prod(t.shape) * itemsize if t.kind in PLAIN else t.nbytes
            for t in self.tensors.values()
        )

    def _read_header(self) -> None:
        cursor = _Cursor(self._map, 4)
        version = cursor.number("I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} says GGUF version {version}; supported: 2 and 3, little endian."
            )
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        self.metadata = dict(cursor.entry() for _ in range(num_keys))
        listed = [cursor.tensor() for _ in range(num_tensors)]
        grain = self.metadata.get("general.alignment", 32)
        if not isinstance(grain, int) or grain < 1:
            raise self._cut_short(f"general.alignment is {grain!r}")
        first = -(-cursor.place // grain) * grain
        self.tensors = {t[0]: self._stored(*t, first) for t in listed}

    def _stored(
        self, name: str, shape: tuple[int, ...], code: int, offset: int, first: int
    ) -> StoredTensor:
        if code not in KINDS:
            kinds = ", ".join(kind for kind, _, _ in KINDS.values())
            raise ModelError(
                f"{self.path}: {name} is stored as {_OTHERS.get(code, f'type {code}')}; supported: "
                f"{kinds}. Take another quantisation of the model, such as Q8_0."
            )
        kind, columns, size = KINDS[code]
        if not shape or 0 in shape or shape[-1] % columns:
            raise self._cut_short(f"{name} of shape {list(shape)} is no whole {kind} blocks")
        start, nbytes = first + offset, math.prod(shape) // columns * size
        if start + nbytes > len(self._map):
            raise self._cut_short(f"{name} ends at byte {start + nbytes:,} of {len(self._map):,}")
        return StoredTensor(name, kind, shape, start, nbytes)


class _Cursor:
    """Reads one thing after the other; struct.error where the file ends before it does."""

    def __init__(self, source: mmap.mmap, place: int) -> None:
        self.source, self.place = source, place

    def number(self, letter: str) -> Any:
        form = _FORMS[letter]
        (value,) = form.unpack_from(self.source, self.place)
        self.place += form.size
        return value

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.source, self.place)
        start = self.place + 8
        self.place = start + length
        if self.place > len(self.source):
            raise struct.error(f"a text of {length} bytes at byte {start}")
        return self.source[start : self.place].decode()

    def entry(self) -> tuple[str, Any]:
        """One key and its value."""
        return self.string(), self._value(self.number("I"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (stored columns first), kind and offset of one tensor."""
        name, dimensions = self.string(), self.number("I")
        sizes = [self.number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def _value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if code not in _NUMBERS:
            raise struct.error(f"a value of type {code} at byte {self.place}")
        return self.number(_NUMBERS[code])

    def _array(self, code: int, count: int) -> Texts | list[Any]:
        if code == _STRING:
            texts = Texts(self.source, self.place, count)
            self.place = texts.end
            return texts
        if code in _NUMBERS:
            values = struct.unpack_from(f"<{count}{_NUMBERS[code]}", self.source, self.place)
            self.place += struct.calcsize(f"<{count}{_NUMBERS[code]}")
            return list(values)
        return [self._value(code) for _ in range(count)]


class Texts:
    """Many texts of a file, such as its tokens: found when it is opened, decoded when asked for."""

    __slots__ = ("_count", "_source", "_start", "end")

    def __init__(self, source: mmap.mmap, start: int, count: int) -> None:
        self._source, self._start, self._count = source, start, count
        unpack, place = _LENGTH.unpack_from, start
        for _ in range(count):
            place += 8 + unpack(source, place)[0]
        self.end = place
        if place > len(source):
            raise struct.error(f"{count} texts end at byte {place}")

    def __repr__(self) -> str:
        return f"<{self._count} texts>"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        held, unpack, start = self._source[self._start : self.end], _LENGTH.unpack_from, 8
        for _ in range(self._count):
            end = start + unpack(held, start - 8)[0]
            yield held[start:end].decode(errors="replace")
            start = end + 8


_FORMS = {letter: struct.Struct("<" + letter) for letter in _NUMBERS.values()}
_LENGTH = _FORMS["Q"]
