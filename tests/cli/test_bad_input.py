"""Bad values on the command line: each one named error with what is allowed, status 2."""

import re

import pytest

from workbench.cli import main
from workbench.errors import ConfigError

LEAST = "'{}': Input should be greater than or equal to {}"
ONE = ["run", "Compute 1+1."]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "--problems", "tiny", "--index", "0", "--level", "9"], "level"),
        (["run", "--llm", "tiny-solvr"], "Did you mean 'tiny-solver'"),
        (["run", "--set", "n=abc"], "SweepConfig.n is 'abc'; allowed: a whole number."),
        (["run", "--llm-share", "1.5"], "'--llm-share': Input should be less than or equal to 1"),
        (["run", ""], "has the text ''"),
        ([*ONE, "--engine", "transformer"], "Did you mean 'transformers'?"),
        ([*ONE, "--engine", "http://127.0.0.1:9?kinds=vllm"], "URLs, each with ?kind=...&files="),
        ([*ONE, "--engine", "http://127.0.0.1:9?timeout=soon"], "URLs, each with ?kind=...&files="),
        (["run", "--strategy", "DVTSS"], "Did you mean 'dvts'"),
        ([*ONE, "--engine", "transformers", "--llm-share", "0.3"], "does not take llm_share"),
        ([*ONE, "--engine", "http://127.0.0.1:9", "--set", "dtype=float16"], "not take dtype"),
        ([*ONE, "--engine", "transformers", "--set", "policy=static"], "does not take policy"),
        ([*ONE, "--index", "0"], "the problem 'Compute 1+1.' and --index"),
        ([*ONE, "--problems", "tiny"], "and --problems"),
        (["run", "--strategy", "dfs"], "strategy is 'dfs'; allowed: beam_search, best_of_n, self_"),
        (["run", "--set", "problems=math500"], "no --set of problems; --problems, --level"),
        (["run", "--strategy", "dvts", "--n", "6"], "n is 6; allowed: multiples of beam_width (4)"),
        ([*ONE, "--strategy", "rebase", "--beam-width", "2"], "rebase has no beam_width, given 2"),
        ([*ONE, "--strategy", "best_of_n", "--set", "max_depth=3"], "has no max_depth, given 3"),
        (["bench", "search", "--strategy", "dvts"], "strategy is dvts; it is of --peer alone"),
        (
            ["bench", "search", "--seeds", "2", "--llm", "smollm2-135m"],
            "is searched alone: give a --peer",
        ),
        (["bench", "search", "--llm", "a", "--model", "b"], "--model or --llm"),
        (["bench", "stale", "--seed", "1"], "bench stale takes no option"),
        (["run", "--index", "-1"], LEAST.format("--index", 0)),
        (["run", "--n", "0"], LEAST.format("--n", 1)),
        (["bench", "search", "--seeds", "0"], LEAST.format("--seeds", 1)),
        (["bench", "engine", "--seed", "-1"], LEAST.format("--seed", 0)),
        (["bench", "memory", "--slo-ttft", "1"], "takes no --slo-ttft; it takes --profile"),
        (["bench", "memory", "--json", "."], "'.' cannot be written"),
        (["bench", "serve", "--url", "localhost:8000"], "give http://HOST:PORT"),
        (["bench", "serve", "--url", "https://127.0.0.1"], "give http://HOST:PORT"),
        (["bench", "serve", "--part", "two", "--peers", "vllm"], "two models there is no peer"),
        (["bench", "serve", "--peers", "transformers"], "transformers is no server"),
        (["bench", "engine", "--device", "cuda", "--peers", "vllm"], "is the only peer"),
        (["advise", "--total", "16GiB"], "llama-3.2-1b and llama-3.1-8b-prm lack"),
        (["train-tiny", "--card", "--num-problems", "0"], LEAST.format("--num-problems", 1)),
        (["train-tiny", "--card", "--minutes", "5"], "--card takes --num-problems and --seed"),
        (["train-tiny", "--num-problems", "5"], "--card takes --num-problems and --seed alone"),
        (["bench", "stale", "--profile", "full"], "bench stale takes no option"),
        (["bench", "stale", "--isa", "avx2"], "bench stale takes no option"),
        (["calibrate", "--out", "here.dev"], "--out is 'here.dev'; give a name that ends in .json"),
        (["train-tiny", "--minutes", "0"], "minutes is 0.0; allowed: more than 0"),
        (["sweep", "--dry-run", "--shares", "0.3,x"], "'0.3,x' is no list of numbers, e.g. 1,2."),
        (["sweep", "--dry-run", "--seeds", "0.5"], "seeds is (0.5,); allowed: a list of whole"),
        (["sweep", "--dry-run", "--set", "shares=[a]"], "shares is '[a]'; allowed: a list of num"),
        (["sweep", "--dry-run", "--set", "shares={[0.3]}"], "shares is '{[0.3]}'; allowed: a list"),
        (["sweep", "--dry-run", "--set", "tempature=1"], "Did you mean 'temperature'"),
        (["sweep", "--dry-run", "--policy", "marginal"], "Did you mean 'marginal_value'"),
        (["sweep", "--dry-run", "--seeds", "0", "--set", "seeds=[1]"], "are one: give either"),
        (["sweep", "--dry-run", "--set", "profile=full"], "--set profile and --profile are one"),
        (["sweep", "--dry-run", "--config", "none.json"], "none.json cannot be read as JSON"),
    ],
)
def test_what_cannot_be_run_says_why_in_one_block(command, said, capsys, tmp_path, monkeypatch):
    """Whatever is wrong: one named error, status 2, never a traceback, and nothing written."""
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and shown.out == ""
    assert not any(tmp_path.iterdir())


def test_debug_shows_the_traceback():
    with pytest.raises(ConfigError):
        main(["sweep", "--set", "tempature=1", "--debug"])


@pytest.mark.parametrize(("share", "lacking"), [("0.01", "LLM"), ("0.99", "PRM")])
def test_a_share_without_room_names_the_model_and_the_shares_that_fit(share, lacking, says):
    said = says(*ONE, "--llm-share", share, status=2)
    assert f"llm_share {share} is infeasible: the {lacking} (tiny-" in said
    assert re.search(r"llm_share 0\.0\d+ to 0\.\d+ is feasible in 64\.0 MiB\.", said)


def test_an_unknown_model_is_refused_before_the_machine_is_measured(monkeypatch, says):
    from workbench.bench import ceilings

    monkeypatch.setattr(ceilings, "tile_shares", lambda: pytest.fail("it measured"))
    assert "nosuch" in says("bench", "engine", "--model", "nosuch", status=2)
