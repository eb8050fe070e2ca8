"""Recorded searches re-enacted over the memory split, beside what a roofline foretells.

On a GPU: `--device cuda --llm dummy:llama-3.2-1b --prm dummy:llama-3.1-8b-prm`, a search made of
MATH-500's lengths, 40 GiB; llm_weights and the like are bytes, as profiling passes measured them.
By default the embedded pair and its recording. One pair of engines is built and its caches resized,
so a share costs one search. The roofline is a data sheet's where the GPU is one of the presets,
else measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from workbench.bench.ceilings import CeilingSizes, measure_gpu_ceiling, require_gpu
from workbench.bench.record import Row, memory_rows
from workbench.bench.replay import this_machine
from workbench.engine.engine import Engine
from workbench.engine.memory import total_of
from workbench.experiments.reenact import reenact
from workbench.models.loading import require_device
from workbench.models.registry import DUMMY
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS, Device
from workbench.replay.simulator import events
from workbench.replay.what_if import what_if
from workbench.replay.workload import load_recording, thesis_search

SHARES = (0.08, 0.15, 0.3, 0.4, 0.5)
SEARCHES = {"quick": (4, 3), "default": (16, 6), "full": (128, 40)}
"""Problems and depth of a search at the thesis's scale; the full one alone outgrows its memory."""
TINY, TINY_RECORDING = "tiny-solver", "tiny-16-n4"
MEMORY_TOLERANCE = 0.1  # what a driver tells, beside the nominal size
OTHER_BUILDS = frozenset({"pcie", "nvl", "laptop", "d"})  # slower ones of a preset's name
KEPT = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(frozen=True, slots=True)
class Scale:
    """What is re-enacted, and in how much memory."""

    answers: Answers
    total_memory: str

    @classmethod
    def of(cls, llm: str, profile: str) -> Scale:
        """The embedded pair's recording, or a search at the thesis's scale."""
        if llm.removeprefix(DUMMY) == TINY:
            return cls(Answers(load_recording(TINY_RECORDING)), "64MiB")
        problems, depth = SEARCHES[profile]
        return cls(Answers(thesis_search(problems, max_depth=depth)), "40GiB")


def run(
    llm: str = "dummy:tiny-solver",
    prm: str = "dummy:tiny-prm",
    profile: str = "default",
    device: str = "cpu",
) -> Iterator[Row]:
    """Memory by part, throughput at each share beside the roofline's, how often events agreed.

    Raises ConfigError for a GPU that is not there, OutOfMemory for one that is too small.
    """
    require_device(device)  # before anything is foretold
    scale, known = Scale.of(llm, profile), known_device(device)
    answers, memory = scale.answers, scale.total_memory
    foretold = {
        share: what_if(answers, device=known, total_memory=memory, llm_share=share)
        for share in SHARES
    }
    engines: list[Engine] = []
    for place, (role, model) in enumerate((("llm", llm), ("prm", prm))):
        config = getattr(answers.recording, role).config or {}
        kept = {name: config[name] for name in KEPT}
        blocks = max(found.memory[place].num_blocks for found in foretold.values())
        engines.append(Engine(model, num_blocks=blocks, device=device, **kept))
        yield from memory_rows(f"{role}_", engines[-1].memory)
    same: list[float] = []
    reenact(answers, engines[0], engines[1])  # kernels are compiled and launches recorded
    for share, replayed in foretold.items():
        for engine, memory_ in zip(engines, replayed.memory, strict=True):
            engine.cache.reset()
            engine.cache.resize(memory_.num_blocks)
        found = reenact(answers, engines[0], engines[1])
        speed, bound = found.throughput.tokens_per_s, replayed.throughput.tokens_per_s
        name = f"reenact_{round(100 * share):03d}"
        peer = f"replay on {known.name}'s roofline"
        yield Row(name, speed, "tokens/s", peer, bound, speed / bound, repeats=1)
        same.append(float(events(found.trace.steps).equals(events(replayed.trace.steps))))
    yield Row("reenact_events_identical", fmean(same), "fraction", repeats=len(same))


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    scale = Scale.of(settings["llm"], settings["profile"])
    recording = scale.answers.recording
    return {
        "batch_invariant": True,
        "total_memory": scale.total_memory,
        "activations_in_total": False,
        "problems": len(recording.problems),
        "problems_in_flight": recording.settings.min_problem_batch,
        **recording.settings.strategy_settings,
    }


def known_device(name: str) -> Device:
    """This machine measured, or its GPU: the preset where there is one, else that measured."""
    if name == "cpu":
        return this_machine()
    place = torch.device(name)
    gpu, memory = torch.cuda.get_device_name(place), total_of(place)
    preset = preset_of(gpu, memory)
    if preset is not None:
        return preset
    place = require_gpu(2 * CeilingSizes().read_bytes, "reenact", name)
    with torch.cuda.device(place):
        ceiling = measure_gpu_ceiling(place, torch.bfloat16)
    torch.cuda.empty_cache()
    return Device(gpu, ceiling.flops_per_s, ceiling.bytes_per_s, memory, "measured")


def preset_of(gpu: str, memory_bytes: int) -> Device | None:
    """The preset of a GPU as its driver names it; None for other builds and other memories.

    A preset's name is words of the driver's ("NVIDIA A100-SXM4-80GB"); its gigabytes, where it ends
    in them, are told by the memory.
    """
    words = set(re.split(r"[\s-]+", gpu.lower()))
    for name, device in PRESETS.items():
        wanted = set(name.split("-")) - {str(device.memory_bytes >> 30)}
        nominal = abs(memory_bytes / device.memory_bytes - 1) < MEMORY_TOLERANCE
        if wanted <= words and nominal and not words & OTHER_BUILDS:
            return device
    return None
