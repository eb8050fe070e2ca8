"""Small random models, whose weights are drawn anew wherever they are loaded; a short search."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench import PRM, BeamSearch, load_problems, run_search
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIG |= {"vocab_size": 50, "max_position_embeddings": 128}


def dummy(folder: Path, config: dict[str, Any] = CONFIG) -> str:
    """The name, for load_model and Engine, of a model that is a config and random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return f"dummy:{folder}"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dummy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(small_model: str) -> LlamaModel:
    return load_model(small_model)


def search(llm: Any, prm: Any, **settings: Any) -> Any:
    """Of three problems, two in flight: the third begins when one of them is answered."""
    strategy = BeamSearch(n=4, beam_width=2, max_depth=6)
    given = {"llm": llm, "prm": PRM(prm), "strategy": strategy, "min_problem_batch": 2}
    return run_search(load_problems("tiny", 3), **given | settings)
