"""What devices can do at best: two slopes and a size, from data sheets or measured.

The figures of GPUs are NVIDIA's for dense bf16 products with fp32 sums and for memory; nothing
reaches them, so a cost fitted to measured steps comes first wherever there is one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from workbench.config import format_size, require_known
from workbench.errors import ConfigError, OutOfMemory, nearest
from workbench.trace import write_atomically


@dataclass(frozen=True, slots=True)
class Device:
    """A roofline. memory_bytes: of the device, nominal; source: where the numbers are from.

    terms: by model name the factors of cost.Terms that were fitted to steps measured on it, and
    {"request": {"seconds": ...}}, what a request takes outside of steps.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    source: str
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "memory_bytes"):
            self._require_number(name, getattr(self, name), "> 0")
        for each in (self.terms, *(self.terms.values() if isinstance(self.terms, Mapping) else ())):
            if not isinstance(each, Mapping):
                raise ConfigError(f"Device {self.name!r} has terms {each!r}; give an object.")
        for model, terms in self.terms.items():
            for name, value in terms.items():
                self._require_number(f"Term {name} of {model}", value, ">= 0")

    def _require_number(self, name: str, value: object, allowed: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
        if not (0 < number < math.inf or (number == 0 and allowed == ">= 0")):
            raise ConfigError(
                f"Device {self.name!r}: {name} is {value!r}; allowed: a number {allowed}."
            )

    def is_fitted_to(self, *models: str) -> bool:
        """Whether steps of all these models were measured on it."""
        return all(model in self.terms for model in models)

    def require_room(self, needed: int, what: str) -> None:
        """OutOfMemory where its memory does not hold so many bytes; drivers and activations take
        more, which the caller must leave.
        """
        if needed > self.memory_bytes:
            raise OutOfMemory(
                f"{what} take {format_size(needed)}; {self.name} has "
                f"{format_size(self.memory_bytes)}. Give less memory, or a larger device."
            )


def _nvidia(name: str, tflops: float, gb_per_s: float, mib: int) -> Device:
    """mib: as nvidia-smi tells it, of which CUDA gives a process some hundred less."""
    return Device(name, tflops * 1e12, gb_per_s * 1e9, mib << 20, "NVIDIA data sheet, dense bf16")


PRESETS = {
    "a100-40": _nvidia("NVIDIA A100 40 GB", 312, 1555, 40960),
    "a100-80": _nvidia("NVIDIA A100 80 GB SXM", 312, 2039, 81920),
    "h100": _nvidia("NVIDIA H100 80 GB SXM", 989.4, 3350, 81559),
    "h200": _nvidia("NVIDIA H200 141 GB SXM", 989.4, 4800, 143771),
    "l40s": _nvidia("NVIDIA L40S", 362.05, 864, 46068),
    "rtx-4090": _nvidia("NVIDIA GeForce RTX 4090", 165.2, 1008, 24564),
}


def load_device(name: str | os.PathLike[str]) -> Device:
    """A preset by its name, or a .json file that `write_device` wrote.

    Raises ConfigError for an unknown name and for a file that lacks a number.
    """
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path, known = Path(name), [f.name for f in fields(Device)]
    if path.suffix != ".json":
        raise ConfigError(
            f"There is no device {str(name)!r}; known: {', '.join(PRESETS)}, or a .json file that "
            f"`workbench calibrate` wrote.{nearest(name, list(PRESETS))}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a device ({error}); make one with `workbench calibrate`."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object: no device.")
    require_known(content, known, str(path))
    missing = [name for name in known if name not in content and name != "terms"]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; a device has {', '.join(known)}.")
    return Device(**content)


def write_device(device: Device, path: str | os.PathLike[str]) -> Path:
    """Write a device as JSON; returns the path."""
    return write_atomically(json.dumps(asdict(device), indent=2) + "\n", path)
