"""Recorded searches re-enacted over the memory split, beside what a roofline foretells.

Real engines compute every token of a recorded search and are told what they sampled and scored, so
lengths, prefixes and the tree are the recorded ones and every step costs what it costs: with
`dummy:` weights a GPU measures models of true size that are not there. One pair of engines is built
and its caches resized, so a share costs one search. The roofline is measured in the same run.

On a GPU: `--device cuda --llm dummy:llama-3.2-1b --prm dummy:llama-3.1-8b-prm`, a search made of
MATH-500's lengths in so little memory that the split matters; by default the embedded pair and its
recording. llm_weights and the like: bytes, as profiling measured them. best_over_worst: of the
shares' throughputs; chosen_over_best: at the slowest of those that the replay calls best.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from workbench.bench.record import Row, memory_rows
from workbench.bench.replay import this_machine
from workbench.core import RequestOutput, SamplingParams, StepPlan, StepResult, Tag
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor, StepHandle
from workbench.errors import ConfigError
from workbench.models.loading import require_device
from workbench.models.registry import DUMMY
from workbench.replay.answers import Answers, RecordedExecutor
from workbench.replay.simulator import events, play
from workbench.replay.what_if import what_if
from workbench.replay.workload import load_recording, thesis_search
from workbench.search.recording import RecordedCritique, RecordedEngine, RecordedStep
from workbench.search.result import Throughput
from workbench.trace import Recorder, Trace

SHARES, SHARES_24 = (0.08, 0.15, 0.3, 0.4, 0.5), (0.11, 0.14, 0.2, 0.24, 0.31)
SEARCHES = {
    "quick": (24, 10, "24GiB", SHARES_24),
    "default": (48, 16, "24GiB", SHARES_24),
    "full": (128, 40, "40GiB", SHARES),
}
"""Problems, depth; memory and shares chosen so that, by the replay, it lacks room at both ends."""
TINY, TINY_RECORDING = "tiny-solver", "tiny-16-n4"
KEPT = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def run(
    llm: str = "dummy:tiny-solver",
    prm: str = "dummy:tiny-prm",
    profile: str = "default",
    device: str = "cpu",
) -> Iterator[Row]:
    """The rows of `workbench bench reenact`: memory by part, throughput at each share beside the
    roofline's, how often events agreed.
    """
    require_device(device)  # before anything is foretold
    answers, total, shares = searched(llm, profile)
    for given, recorded in ((llm, answers.recording.llm), (prm, answers.recording.prm)):
        if given.removeprefix(DUMMY) != recorded.name:
            pair = f"{answers.recording.llm.name} and {answers.recording.prm.name}"
            raise ConfigError(f"{given} is none of the search's models, which are {pair}.")
    known = this_machine(device)
    foretold = {
        share: what_if(answers, device=known, total_memory=total, llm_share=share)
        for share in shares
    }
    engines: list[Engine] = []
    for place, (role, model) in enumerate((("llm", llm), ("prm", prm))):
        config = getattr(answers.recording, role).config or {}
        kept = {name: config[name] for name in KEPT}
        blocks = max(found.memory[place].num_blocks for found in foretold.values())
        engines.append(Engine(model, num_blocks=blocks, device=device, **kept))
        yield from memory_rows(f"{role}_", engines[-1].memory)
    rates: list[tuple[float, float]] = []  # foretold, measured
    same: list[float] = []
    reenact(answers, *engines)  # kernels are compiled and launches recorded
    for share, replayed in foretold.items():
        for engine, memory in zip(engines, replayed.memory, strict=True):
            engine.cache.reset()
            engine.cache.resize(memory.num_blocks)
        trace, found = reenact(answers, *engines)
        speed, bound = found.tokens_per_s, replayed.throughput.tokens_per_s
        rates.append((bound, speed))
        name, peer = f"reenact_{round(100 * share):03d}", f"replay on {known.name}'s roofline"
        yield Row(name, speed, "tokens/s", peer, bound, speed / bound, repeats=1)
        ours, theirs = (
            events(each.steps).drop(columns="step")  # counted since the engine was built
            for each in (trace, replayed.trace)
        )
        same.append(float(ours.equals(theirs)))
    yield Row("reenact_events_identical", fmean(same), "fraction", repeats=len(same))
    yield from split_rows(rates)


def split_rows(rates: Sequence[tuple[float, float]]) -> Iterator[Row]:
    """What the split gained, of rates foretold and measured at each share."""
    bounds, speeds = zip(*rates)
    gain, known = (max(each) / min(each) for each in (speeds, bounds))
    yield Row("reenact_best_over_worst", gain, "ratio", "replay", known, gain / known, repeats=1)
    chosen = min(speed for bound, speed in rates if bound == max(bounds))
    yield Row("reenact_chosen_over_best", chosen / max(speeds), "fraction", repeats=1)


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    answers, total, _ = searched(settings["llm"], settings["profile"])
    recording = answers.recording
    return {
        "batch_invariant": True,
        "total_memory": total,
        "activations_in_total": False,
        "problems": len(recording.problems),
        "problems_in_flight": recording.settings.min_problem_batch,
        **recording.settings.strategy_settings,
    }


def searched(llm: str, profile: str) -> tuple[Answers, str, tuple[float, ...]]:
    """The search, its memory and the LLM's shares: the embedded pair's, or the thesis's scale."""
    if llm.removeprefix(DUMMY) == TINY:
        return Answers(load_recording(TINY_RECORDING)), "64MiB", SHARES
    problems, depth, total, shares = SEARCHES[profile]
    return Answers(thesis_search(problems, max_depth=depth)), total, shares


# -- engines that are told what they sampled --


def reenact(answers: Answers, llm: Engine, prm: Engine) -> tuple[Trace, Throughput]:
    """The recorded search on these engines, from empty caches; both stay usable.

    Raises RecordingError, and ConfigError where the vocabulary lacks a recorded token.
    """
    most, known = int(answers.tokens.tokens.max()), llm.spec.vocab
    if most >= known:
        raise ConfigError(
            f"The recording has token {most}; {llm.name} knows {known} tokens: give a model with a "
            "larger vocabulary."
        )
    recorder, executor = Recorder("reenact"), llm.executor
    sampling = ReenactedEngine(llm, answers.recording.llm, answers)
    scoring = ReenactedEngine(prm, answers.recording.prm, answers)
    recorded = RecordedExecutor(answers.tokens)
    forced: Any = ForcedExecutor(executor, executor.storage, recorded)
    llm.executor = forced
    try:
        speed = play(answers, (sampling, scoring), recorder, time.perf_counter)
    finally:
        llm.executor = executor
    return recorder.trace(), speed


@dataclass(frozen=True, slots=True)
class ForcedExecutor:
    """A real executor that computes and samples, and then returns the recorded tokens."""

    executor: Executor
    storage: Any  # the real one's
    recorded: RecordedExecutor

    def submit(self, plan: StepPlan) -> StepHandle:
        """The step, carried out; its sampled tokens are the recorded ones."""
        outcome = self.executor.submit(plan).outcome
        if isinstance(outcome, StepResult) and len(plan.sampling):
            outcome = replace(outcome, tokens=self.recorded.run(plan).tokens)
        return StepHandle(outcome)


class ReenactedEngine:
    """A real engine in the place of a recorded one; what is not here is the engine's own."""

    capabilities = frozenset({"trace"})
    tokenizer = None

    def __init__(self, engine: Engine, recorded: RecordedEngine, answers: Answers) -> None:
        engine.cache.reset()
        self.engine, self._answers = engine, answers
        self.max_model_len = recorded.max_model_len
        self._steps: dict[int, RecordedStep | RecordedCritique] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(self, prompt: Sequence[int], params: SamplingParams, *, tag: Tag) -> int:
        """Queue the node that the tag names; it ends when it has as many tokens as recorded."""
        step = self._answers.sampled(params, tag).step
        asked = replace(params, max_tokens=len(step.tokens), stop=(), ignore_eos=True)
        number = self.engine.add(list(prompt), asked, tag=tag)
        self._steps[number] = step
        return number

    def add_score(self, token_ids: Any, positions: Any, columns: Any, *, tag: Tag | None) -> int:
        """Queue a scoring request; as many columns are computed as the recorded PRM was asked."""
        return self.engine.add_score(list(token_ids), positions, range(len(columns)), tag=tag)

    def step(self) -> list[RequestOutput]:
        """One scheduling step of the engine; finished nodes are told as they were recorded."""
        outputs = self.engine.step()
        for place, output in enumerate(outputs):
            step = self._steps.pop(output.request_id, None)
            if step is not None and output.error is None and output.finish_reason != "abort":
                assert output.token_ids == step.tokens, "the engine was told what to sample"
                reason = step.finish_reason
                outputs[place] = replace(output, text=step.text, finish_reason=reason)
        return outputs
