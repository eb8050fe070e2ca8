"""Whole systems beside ours: who is named, what is counted in a peer's own code, what rows say."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bench.test_peers import environment
from tests.serving.conftest import running
from workbench.bench import beside, search
from workbench.bench.beside import HITS, Measured, chosen_systems, compared, rows_beside
from workbench.bench.peers import PeerError, PeerProcess
from workbench.bench.search import PEER_REPEATS as TIMES
from workbench.bench.search import make_workload
from workbench.bench.serve import metrics_of
from workbench.errors import ConfigError
from workbench.experiments.execute import make_search
from workbench.experiments.runs import sweep_problems
from workbench.models.registry import find_model
from workbench.tokenizer import Tokenizer

VLLM = '''
"""vLLM as search-and-learn calls it: as many tokens as are asked for, and a stop."""
import transformers
from types import SimpleNamespace as Made

__version__ = "1.2"


class LLM:
    emptied = 0

    def __init__(self, model, **settings):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def get_tokenizer(self):
        return self.tokenizer

    def reset_prefix_cache(self):
        LLM.emptied += 1

    def generate(self, prompts, params, use_tqdm):
        ids = list(range(params.max_tokens))
        return [Made(outputs=[Made(text="3+4\\n\\n", token_ids=ids)]) for _ in prompts]
'''
SAL = {
    "config.py": '''
from dataclasses import dataclass


@dataclass
class Config:
    """Some of theirs, and a batch of two problems."""

    approach: str = "best_of_n"
    n: int = 4
    max_tokens: int = 2048
    num_iterations: int = 40
    search_batch_size: int = 2
    seed: int = 42
    custom_chat_template: str = "Llama's"
''',
    "models/reward_models.py": '''
class RLHFFlow:
    """How theirs uses model and tokenizer, in two lines."""

    def __init__(self, config):
        self.search_config = config
        self.model, self.tokenizer = self.load_model_and_tokenizer()

    def score(self, questions, outputs):
        mark = self.tokenizer("ки", return_tensors="pt").input_ids[0, 1]
        chats = [[[{"role": "user", "content": q + o}, {"role": "assistant", "content": v}]
                  for q, each in zip(questions, outputs) for o in each] for v in ("+", "ки")]
        shown, marked = (self.tokenizer.apply_chat_template(c, padding=True, return_tensors="pt")
                         for c in chats)
        assert shown.shape == marked.shape and (marked == mark).sum() == len(chats[0])
        return self.model(shown).logits[:, :, self.candidate_tokens]
''',
    "search/__init__.py": '''
from types import SimpleNamespace as Made


def searched(x, config, llm, prm):
    """n completions a problem in two calls, each scored twice."""
    assert config.custom_chat_template is None and len(x["problem"]) <= 2
    for most in (2048, 7):
        params = Made(max_tokens=most)
        found = llm.generate(x["problem"] * config.n, sampling_params=params, use_tqdm=False)
    texts = [[output.outputs[0].text] for output in found]
    for _ in range(2):
        prm.score(x["problem"] * config.n, texts)
    texts = [text for each in texts for text in each]
    each = [texts[k::len(x["problem"])] for k in range(len(x["problem"]))]
    return {"completions": each, "scores": [[[0.5, 0.25]] * config.n for _ in each]}


beam_search = best_of_n = dvts = searched
''',
}


@pytest.fixture
def checkout(tmp_path):
    """A checkout that is not theirs: the names that the worker uses of it."""
    for name, text in SAL.items():
        file = tmp_path / "checkout" / "src" / "sal" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "checkout"


@pytest.fixture
def folder(tmp_path):
    """An environment whose interpreter has that vLLM."""
    return environment(tmp_path, VLLM)


def test_what_a_peers_own_searches_cost_is_counted(checkout, folder):
    """At most the tokens asked for, no padding; distinct tokens, version and what it ran with."""
    model = str(find_model("tiny-solver"))
    settings = {"checkout": str(checkout), "packages": "", "model": model, "prm": model}
    settings |= {"threads": 1, "dtype": "float32", "config": {"n": 3, "max_tokens": 9}}
    peer = PeerProcess("search-and-learn", folder, settings)
    try:
        found = peer.ask({"problems": ["1+1", "2+2+2", "1+1"]}, "search")
        again = peer.ask({"problems": ["1+1"], "max_tokens": 5}, "search")
    finally:
        peer.close()
    assert peer.version.startswith("float32, 1 threads, vllm 1.2, transformers ")
    assert found["tokens"] == 3 * 3 * (9 + 7)  # a call of 2,048 has the limit, one of 7 its own
    assert again["tokens"] == 3 * (5 + 5)
    assert again["solved"] == [(["3+4\n\n"] * 3, [[0.5, 0.25]] * 3)]
    assert len(found["solved"]) == 3
    # each of three completions is scored twice; the batch's rows repeat each other
    assert again["prm_computed"] == 6 * again["prm_distinct"]
    assert found["prm_distinct"] > again["prm_distinct"]
    assert found["wall_s"] >= found["llm_s"] + found["prm_s"] > 0


def test_a_checkout_without_its_code_says_so(folder, tmp_path):
    """Guards the reason's way from an import that fails in the peer's environment."""
    given = {"checkout": str(tmp_path), "packages": "", "model": "", "prm": "", "threads": 1}
    with pytest.raises(PeerError, match=r"and-learn failed at 'load': ModuleNotFound.*'sal'"):
        PeerProcess("search-and-learn", folder, given | {"dtype": "float32", "config": {}})


def test_systems_are_chosen_by_name_and_path(checkout, tmp_path):
    """Guards --peer: two at a time, a checkout of one's own, and clear refusals."""
    assert chosen_systems("vllm-both") == {"vllm-both": None}
    both = chosen_systems(f"search-and-learn={checkout}, vllm-both")
    assert both == {"search-and-learn": str(checkout), "vllm-both": None}
    with pytest.raises(ConfigError, match=r"peer is 'vllm-bth'.*Did you mean 'vllm-both'"):
        chosen_systems("vllm-bth")
    for wrong in (f"search-and-learn={tmp_path}", f"vllm-both={checkout}"):
        with pytest.raises(ConfigError, match=r"src/sal.*make bench-peers"):
            chosen_systems(wrong)


def test_rows_say_where_the_time_went_and_who_is_better():
    """Guards the direction of every ratio: above 1 ours is better, of rates and of costs."""
    ours = Measured("", 10.0, 6.0, 3.0, 1000, 110.0, 100.0, 10**9, (), (0.9, 0.8))
    theirs = Measured("v1", 40.0, 10.0, 29.0, 2000, 900.0, 100.0, 4 * 10**9, (), (0.5, 0.4))
    rows = {row.name: row for row in compared("vllm-both", 2, [ours], [theirs], judged=False)}
    told = {k.split("@")[0]: (row.value, row.peer_value, row.ratio) for k, row in rows.items()}
    assert told["problems_per_min"] == (12.0, 3.0, 4.0)
    assert told["tokens_per_s"] == (100.0, 50.0, 2.0)
    assert told["prm_s"] == (1.5, 14.5, pytest.approx(29 / 3))
    assert told["rest_s"] == (0.5, 0.5, 1.0)
    assert told["prm_over_ideal"] == (1.1, 9.0, pytest.approx(9 / 1.1))
    assert told["peak_memory"][2] == 4.0
    assert told["prm_hits"] == (0.8, 0.4, None)
    assert all(row.peer == "vllm-both (v1)" for row in rows.values())
    assert all(row.repeats == 1 and row.spread is None for row in rows.values())


def test_repeats_are_paired_by_their_seed():
    """Medians of all repeats, the ratio's least and most, and the most memory of any."""
    ours = [Measured("", wall, 1.0, 1.0, 100, 1.0, 1.0, peak) for wall, peak in (
        (10.0, 3), (20.0, 5), (5.0, 4))]  # fmt: skip
    theirs = [Measured("v1", wall, 1.0, 1.0, 300, 2.0, 1.0, 10) for wall in (20.0, 20.0, 30.0)]
    found = compared("vllm-both", 1, ours, theirs, judged=False)
    rows = {row.name.split("@")[0]: row for row in found}
    pace, memory = rows["problems_per_min"], rows["peak_memory"]
    assert (pace.value, pace.peer_value) == (6.0, 3.0)
    assert pace.ratio == 2.0 and pace.spread == (1.0, 6.0) and pace.repeats == 3
    assert (memory.value, memory.peer_value) == (5, 10)
    assert memory.ratio == 2.5 and memory.spread == (2.0, pytest.approx(10 / 3))
    assert rows["tokens"].value == 100 and rows["tokens"].ratio is None
    assert rows["tokens"].repeats == 3 and "llm_hits" not in rows


def test_answers_of_a_trained_reward_model_are_judged():
    """One vote for every system; the gain is paired by problem, each with all its seeds."""
    texts = [r"\boxed{7}", r"\boxed{8}", r"\boxed{7}", "no answer"]
    for scores, right in ((0.1, False), (0.3, True)):
        each = [[0.9, scores], [0.1, 0.5], [scores], [1.0]]
        assert beside.is_right("7", texts, each, "weighted") is right
    assert not beside.is_right("7", ["7"], [[1.0]], "weighted")
    assert beside.is_right("8", texts, [[0.1], [0.9], [0.1], [0.2]], "naive")
    few = 10.0, 1.0, 1.0, 100, 1.0, 1.0, 1
    ours = [Measured("", *few, right) for right in ((True, True, False), (True, False, False))]
    theirs = [Measured("v1", *few, right) for right in ((True, False, False), (False,) * 3)]
    rows = {row.name: row for row in compared("vllm-both", 3, ours, theirs, judged=True)}
    both, gain = rows["accuracy@vllm-both"], rows["gain_over@vllm-both"]
    assert (both.value, both.peer_value) == (pytest.approx(3 / 6), pytest.approx(1 / 6))
    assert gain.value == pytest.approx(1 / 3) and both.repeats == gain.repeats == 2
    assert gain.spread[0] == 0.0 and gain.spread[1] == pytest.approx(0.5)


@pytest.mark.parametrize("prm", ["tiny-solver", "tiny-prm"])
def test_our_rounds_over_servers_are_measured(prm, monkeypatch):
    """Our own server in vLLM's place; each seed's search begins with emptied caches."""
    workload = make_workload("tiny-solver", prm, limit=1, n=4, max_depth=3)
    models = [Path("tiny-solver"), Path(prm)]
    with running(tuple(dict.fromkeys(map(str, models)))) as service:
        started, emptied = list[Path](), list[str]()
        monkeypatch.setattr(beside, "vllm_command", lambda label, folder, *_, **__: folder)
        served = lambda f: started.append(f) or nullcontext(service.url)  # noqa: E731
        monkeypatch.setattr(beside, "served", served)
        monkeypatch.setattr(beside.httpx, "post", lambda url: emptied.append(url) or Mock())
        monkeypatch.setattr(beside, "version_of", lambda *_: " 9")
        _, before = metrics_of(service.url, *HITS)
        measured = beside.over_servers(workload, models, "2GiB", (3, 4, 3))
        assert metrics_of(service.url, *HITS)[1] > before >= 0
    assert started == models and emptied == [f"{service.url}/reset_prefix_cache"] * 2 * 3
    assert measured[0].tokens == measured[2].tokens != measured[1].tokens  # as their seeds
    for found in measured:
        assert found.version.startswith("vllm 9, ")
        assert found.tokens > 0 and found.wall_s > found.llm_s + found.prm_s > 0
        assert 0 < found.hits[0] < 1 and found.prm_distinct > 0 and found.peak_bytes > 0
    ours = beside.measured_here(workload, "16MiB", (3, 4, 3))
    assert ours[0].tokens == ours[2].tokens != ours[1].tokens and ours[0].hits == ours[2].hits


def test_our_last_iteration_goes_on_past_its_step():
    """As search-and-learn's does, to as many tokens as a step may have; only a beam search's."""
    workload = make_workload("tiny-solver", limit=1, n=4, max_depth=1, max_step_tokens=60)
    pair = search.roomy_engine("tiny-solver"), search.roomy_engine("tiny-prm")
    problems = sweep_problems(workload)
    ours = beside.search_of(problems, pair, workload, 0).play().throughput.tokens
    assert make_search(problems, *pair, workload, 0).play().throughput.tokens < ours <= 4 * 60
    other = replace(workload, strategy="dvts")
    runs = [beside.search_of(problems, pair, other, 0), make_search(problems, *pair, other, 0)]
    assert len({run.play().throughput.tokens for run in runs}) == 1


def test_a_peer_searches_again_in_the_same_process(monkeypatch, tmp_path):
    """One start, a short search that is not counted, then one a seed."""
    counts = dict.fromkeys(("llm_s", "prm_s", "tokens", "prm_computed", "prm_distinct"), 1)
    peer, answers = Mock(version="v1"), (r"\boxed{0}", r"\boxed{%s}")
    problem = sweep_problems(make_workload("tiny-solver", limit=1))[0]
    tries = [[([text.replace("%s", problem.answer)], [[0.5]])] for text in (*answers, answers[1])]
    answered = zip((1, 2, 3), tries)
    peer.ask.side_effect = [counts | {"wall_s": s, "solved": solved} for s, solved in answered]
    started = Mock(return_value=peer)
    monkeypatch.setattr(beside, "PeerProcess", started)
    (tmp_path / "src" / "sal").mkdir(parents=True)
    workload = make_workload("tiny-solver", "tiny-solver", limit=1, n=4, max_depth=2)
    models = Path("solver"), Path("prm")
    measured = beside.by_search_and_learn(workload, models, str(tmp_path), "2GiB", (5, 6))
    assert [made.args[2]["config"]["seed"] for made in started.call_args_list] == [5]
    assert [started.call_args.args[2][role] for role in ("model", "prm")] == ["solver", "prm"]
    assert [each.correct for each in measured] == [(True,), (True,)]
    assert [asked.args[0].get("seed") for asked in peer.ask.call_args_list] == [None, 5, 6]
    assert [each.wall_s for each in measured] == [2, 3]


def test_a_short_look_at_memory_sees_its_ends(monkeypatch):
    """Guards what was held before and is held after, where all is over before the first look."""
    monkeypatch.setattr(beside, "LOOK_S", 60.0)
    with beside.peak_memory() as none:
        pass
    with beside.peak_memory() as after:
        held = b"1" * (300 << 20)
    with beside.peak_memory() as before:
        del held
    assert none() > 0 and min(after(), before()) > none() + (250 << 20)


def test_repeats_are_of_peers(monkeypatch):
    """Guards --repeats: the profile's number, or what is given, refused where it is not used."""
    given = list[list[int]]()
    monkeypatch.setattr(search, "shared_workload", lambda profile, *_: (None, TIMES[profile]))
    monkeypatch.setattr(search, "rows_beside", lambda *_, seeds: given.append([*seeds]) or ())
    for profile, repeats in (("quick", None), ("default", None), ("quick", 4)):
        assert not [*search.run(profile, peer="vllm-both", repeats=repeats)]
    assert given == [[0], [0, 1, 2], [0, 1, 2, 3]]
    with pytest.raises(ConfigError, match="repeats is 2; it is of --peer"):
        next(search.run(repeats=2))


def test_memory_at_its_peak_is_that_of_the_processes_asked_about(monkeypatch):
    """Guards that nothing of ours is taken for a peer's, nor what was held before for ours."""
    monkeypatch.setattr(beside, "LOOK_S", 0.02)
    child = "held = b'1' * (200 << 20); print(); input()"
    held = b"1" * (300 << 20)
    others = sum(map(beside.memory_of, beside.below(os.getpid())))  # what other tests left
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", child], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline()
        with beside.peak_memory(own=False) as below, beside.peak_memory() as every:
            time.sleep(0.5)
        assert 200 << 20 < below() - others < 300 << 20 < 500 << 20 < every() - others
        del held
        with beside.peak_memory() as now:
            time.sleep(0.5)
        assert 200 << 20 < now() < every() - (250 << 20)
        process.communicate(b"\n")


def test_a_peer_that_is_missing_is_a_failed_row(monkeypatch, tmp_path):
    """Guards that our own measurement is kept, and the exit status of the command."""
    monkeypatch.chdir(tmp_path)
    workload = make_workload("tiny-solver", "tiny-solver", limit=1, n=4, max_depth=2)
    rows = list(rows_beside(workload, chosen_systems("search-and-learn,vllm-both"), "16MiB"))
    assert [row.name for row in rows] == [f"problems_per_min@{name}" for name in (
        "search-and-learn", "vllm-both")]  # fmt: skip
    assert all(row.failed and "make bench-peers" in row.unit for row in rows)
    for prm, form in (("qwen2.5-math-prm-7b", None), ("tiny-prm", "thinkprm")):
        other = make_workload("tiny-solver", prm, limit=1) if form is None else replace(
            make_workload("tiny-solver", limit=1), prm_format=form)  # fmt: skip
        with pytest.raises(ConfigError, match=f"prm '{prm}'"):
            next(rows_beside(other, {}, "16MiB"))
    with pytest.raises(ConfigError, match="strategy 'rebase'"):
        next(rows_beside(make_workload("tiny-solver", limit=1, strategy="rebase"), {}, "16MiB"))


def test_what_systems_share_of_the_embedded_pair_and_of_a_model_of_true_size():
    """Guards the tokens of a prompt, which every system is told alike, and what is judged."""
    own, times = search.shared_workload("default", search.TINY, None, None, "dvts")
    alone = make_workload(search.TINY)
    assert (own.num_problems, own.strategy, own.levels, times) == (32, "dvts", (), 1)
    assert (own.prm, own.max_depth) == (search.TINY_PRM, alone.max_depth)
    tokenizer = Tokenizer.from_folder(find_model(search.TINY))
    problem = sweep_problems(own)[0].problem
    told = [{"role": "system", "content": own.system_prompt}, {"role": "user", "content": problem}]
    chats = [tokenizer.render_chat(each) for each in (told, told[1:])]
    assert chats[0] == chats[1]
    large, times = search.shared_workload("default", "smollm2-135m", None, None, "beam_search")
    assert (large.prm, large.num_problems, large.levels, times) == (large.llm, 3, (1, 2), 3)


@pytest.mark.parametrize("model", ["tiny-solver", "tiny-prm"])
def test_a_model_with_wider_heads_computes_the_same(model, tmp_path):
    """Guards what stands in for a model whose heads are too narrow for a peer."""
    transformers = pytest.importorskip("transformers")
    folder = find_model(model)
    wide = beside.with_wide_heads(folder, tmp_path / "models")
    pair = [transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
            for each in (folder, wide)]  # fmt: skip
    assert [each.config.head_dim for each in pair] == [16, beside.HEAD]
    ids = torch.arange(6, 306)[None]
    with torch.inference_mode():
        own, same = (each(ids).logits for each in pair)
    assert (own - same).abs().max() < 1e-4 < own.std()
    assert beside.with_wide_heads(folder, tmp_path / "models") == wide
    assert beside.with_wide_heads(wide, tmp_path / "models") == wide
    other = shutil.copytree(folder, tmp_path / model)  # of the same name, with other weights
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    again = beside.with_wide_heads(other, tmp_path / "models")
    assert {*(tmp_path / "models").iterdir()} == {wide, again} and again != wide
