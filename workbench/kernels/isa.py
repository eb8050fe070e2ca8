"""The instruction set that CPU kernels are compiled for, and the tiles that fill its registers.

A tile's sums, one row of weights and one spread number stay in registers, so each set has tiles of
its own. They change no result: an element is one fused sum over ascending inputs whatever the tile,
and `vectors.WIDTH`, the sixteen sums of a reduction, is part of the arithmetic, not of a set. So
every set gives the same bits. The environment variable WORKBENCH_ISA names a lesser set than the
host has.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace

from llvmlite import binding
from numba import config
from numba.core.registry import cpu_target

from workbench.errors import ConfigError

VARIABLE = "WORKBENCH_ISA"
# What makes torch, oneDNN and MKL take a lesser set; read when they are loaded.
_PEERS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_NAMES = {"avx512": ("avx512", "AVX512_CORE", "AVX512"), "avx2": ("avx2", "AVX2", "AVX2")}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Tiles in rows and in vectors of 16 float32: one register, two (AVX2) or four (NEON) of them.

    processor: LLVM's name for a processor that has this set and no more.
    tile: of a product, rows x vectors; few: the same of a product that widens its weights.
    at_once: inputs in a pass of a product's loop, as measured: more on AVX-512 only takes longer to
    compile, and NEON's registers are full.
    depth: inputs that a product of many rows widens at a time, at most.
    attention: rows at most of its tiles of one vector, of two, and so on.
    """

    name: str
    processor: str
    tile: tuple[int, int]
    at_once: int
    depth: int
    few: tuple[int, int]
    attention: tuple[int, ...]


SETS = {
    kind.name: kind
    for kind in (
        InstructionSet("avx512", "x86-64-v4", (14, 2), 2, 768, (4, 2), (14, 14, 8, 6)),
        InstructionSet("avx2", "x86-64-v3", (6, 1), 4, 128, (1, 2), (6, 2, 1, 1)),
        InstructionSet("neon", "generic", (6, 1), 1, 128, (1, 1), (6, 2)),
    )
}
_WIDEST = {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"}


def host_sets() -> list[str]:
    """The sets that this host has, the best first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ["neon"]
    has = {name for name, there in binding.get_host_cpu_features().items() if there}
    wanted = {"avx512": _WIDEST, "avx2": {"avx2", "fma", "f16c"}}
    return [name for name, needed in wanted.items() if needed <= has]


def _refused(name: str) -> str:
    has = " and ".join(host_sets()) or "none of the sets known here"
    return f"There is no instruction set {name!r} on this host: it has {has}. Take one it has."


def _choose() -> InstructionSet:
    """The set that the environment names, or the host's best.

    An x86 without AVX2 and FMA has no set here: it takes AVX2's tiles, and LLVM what there is.
    """
    sets, named = host_sets(), os.environ.get(VARIABLE)
    if named and named not in sets:
        raise ConfigError(_refused(named))
    if not sets:
        return replace(SETS["avx2"], name="baseline")
    if named and named != sets[0]:
        _compile_for(SETS[named].processor)
    return SETS[named or sets[0]]


def _compile_for(processor: str) -> None:
    """Has numba compile for a processor from here on.

    Raises ConfigError if it has compiled before: its one code generator keeps the host's features,
    and the set would be another than the one that records and kept kernels name.
    """
    config.CPU_NAME, config.CPU_FEATURES = processor, ""
    if cpu_target.target_context.codegen().magic_tuple()[2] != config.CPU_FEATURES:
        raise ConfigError(
            f"{VARIABLE} came too late: numba has compiled for the host already. "
            "Import workbench before anything else that uses numba."
        )


def environment(name: str) -> dict[str, str]:
    """The variables under which a new process and what it computes with take a set.

    Raises ConfigError for one that this host does not have.
    """
    if name not in host_sets():
        raise ConfigError(_refused(name))
    return {VARIABLE: name} | dict(zip(_PEERS, _NAMES.get(name, ())))


ISA = _choose()
