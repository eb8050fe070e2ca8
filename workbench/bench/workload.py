"""What the search benchmarks search: the tiny family, or MATH problems for a model of true size.

A real generator needs a reward model that takes its share of time; where none is named, the
generator's own weights are asked in RLHFlow's form: the shape and the cost of a PRM, scores that
mean nothing. So such a workload is for speed, memory and sameness, never for accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.engine.engine import Engine
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult
from workbench.search.search import SYSTEM_PROMPTS, chat_prompt, run_search
from workbench.search.strategies import BeamSearch

TINY = {"tiny-solver": "tiny-prm"}  # generator -> its reward model
FIELD_PROMPT = "search-and-learn"  # what a real generator is told
TINY_SOURCE, REAL_SOURCE = "tiny", "math500"


@dataclass(frozen=True, slots=True)
class Workload:
    """Problems, models and the search over them.

    max_step_tokens: of one step, at most; system_prompt: one of SYSTEM_PROMPTS, or the template's.
    """

    llm: str
    prm: str
    problems: tuple[Problem, ...]
    n: int = 16
    beam_width: int = 4
    max_depth: int = 10
    max_step_tokens: int = 128
    in_flight: int = 8
    system_prompt: str | None = None

    @property
    def mode(self) -> dict[str, Any]:
        """The search's sizes as a record's mode names them."""
        return {
            "prm": self.prm,
            "n": self.n,
            "beam_width": self.beam_width,
            "max_depth": self.max_depth,
            "max_step_tokens": self.max_step_tokens,
            "problems_in_flight": self.in_flight,
            "system_prompt": self.system_prompt,
        }

    @property
    def label(self) -> str:
        """The generator's name as rows carry it: `smollm2` of `smollm2-135m`."""
        return Path(self.llm).name.split("-")[0].lower()

    @property
    def _system_prompt(self) -> str | None:
        return None if self.system_prompt is None else SYSTEM_PROMPTS[self.system_prompt]

    def reward(self, engine: Engine) -> PRM:
        """The scoring end over an engine of `prm`."""
        return PRM(engine, "rlhflow" if self.prm == self.llm else None)

    def prompt(self, problem: Problem, llm: Engine) -> list[int]:
        """Token ids before anything is sampled."""
        return chat_prompt(problem, llm, self._system_prompt)

    def search(self, llm: Engine, prm: PRM, seed: int = 0, **settings: Any) -> SearchResult:
        """Beam search over all problems."""
        return run_search(
            list(self.problems),
            llm=llm,
            prm=prm,
            strategy=BeamSearch(self.n, self.beam_width, self.max_depth),
            seed=seed,
            temperature=0.8,
            max_step_tokens=self.max_step_tokens,
            min_problem_batch=self.in_flight,
            system_prompt=self._system_prompt,
            **settings,
        )


def is_tiny(llm: str) -> bool:
    """Whether the generator is the embedded one, whose searches are studied for accuracy too."""
    return llm in TINY


def reward_model(llm: str, prm: str | None) -> str:
    """The reward model's name: as given, else the generator's own."""
    return prm or TINY.get(llm, llm)


def real_workload(llm: str, prm: str | None, source: str | None, limit: int) -> Workload:
    """Eight or so MATH problems asked as the field asks, 16 beams, 10 iterations of at most 128
    tokens.
    """
    problems = tuple(load_problems(source or REAL_SOURCE, limit=limit))
    return Workload(llm, reward_model(llm, prm), problems, system_prompt=FIELD_PROMPT)
