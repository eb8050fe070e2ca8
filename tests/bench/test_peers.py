"""Peers in processes of their own: the pipe, what is left out and why, and the files they read."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.gguf_making import TOKENS, random_tensors, write_gguf
from workbench.bench import engine, peers
from workbench.bench.engine import TRANSFORMERS, EngineBench, Work, chosen_peers, peer_files
from workbench.bench.peers import PEERS, SYSTEMS, PeerError, PeerProcess
from workbench.errors import ConfigError

FAKE = '''
"""vLLM as a worker sees it: a token a sequence and step, noisy, and fails when asked to."""
import os
from types import SimpleNamespace as Made

__version__ = "1.2"


class SamplingParams(Made):
    def clone(self):
        return self


class LLM:
    def __init__(self, model, **settings):
        os.write(1, b"noise")
        if model == "none":
            raise ValueError("no such model")
        self.llm_engine, self.requests = self, {}

    def add_request(self, name, prompt, params):
        if prompt["prompt_token_ids"][0] == 13:
            os.write(2, b"out of luck")
            os._exit(3)
        self.requests[name] = [], params

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        print("more noise")
        found = []
        for name, (tokens, params) in list(self.requests.items()):
            tokens.append(7)
            found.append(Made(request_id=name, outputs=[Made(token_ids=tokens)]))
            if len(tokens) == params.max_tokens:
                del self.requests[name]
        return found
'''


def environment(folder, vllm):
    """The folder, with an interpreter that has this text for its vLLM."""
    (folder / "vllm.py").write_text(vllm)
    python = folder / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Starts the real worker over a fake vLLM; ended after the test."""
    environment(tmp_path, FAKE)
    monkeypatch.setattr(peers, "SETTLE_SECONDS", 0)
    started = []

    def start(model="some"):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 32}
        given = {"model": model, "threads": 2, **limits}
        started.append(PeerProcess("vllm", tmp_path, given))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


def test_a_peer_tells_rates_whatever_it_prints(fake):
    """Guards the protocol: noise on standard output never mixes with the replies."""
    peer = fake()
    assert peer.version == "1.2 (float32, 2 threads, attention and torch.compile by default)"
    for _ in range(2):
        assert peer.timed(np.zeros((3, 4), np.int64), 10)[0] == 27
        assert peer.timed(np.zeros((1, 8), np.int64), 1)[0] == 8


def test_a_peer_that_fails_or_dies_says_why(fake):
    """Guards that its own reason reaches the reader, and against waiting for ever on a worker."""
    with pytest.raises(PeerError, match="vllm failed at 'load': ValueError: no such model"):
        fake("none")
    with pytest.raises(PeerError, match=r"vllm ended at 'timed': .*out of luck"):
        fake().timed(np.full((1, 2), 13), 1)


def test_a_peer_that_is_missing_is_left_out_with_a_warning(monkeypatch, tmp_path):
    """Guards that a machine without peers measures all the same, and says how to get them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "BFLOAT16", set())
    small = Work(1, 4, 2), Work(1, 8)
    with pytest.warns(UserWarning, match="Rows have no") as told:
        found = EngineBench("tiny-solver", small, 1, peers=("vllm", "llama.cpp"))
    assert set(found.labels) == {TRANSFORMERS, "products"}
    said = [str(warning.message) for warning in told if "Rows have" in str(warning.message)]
    assert said[0].startswith("Rows have no vllm: vllm is not installed")
    assert "make bench-peers" in said[0]
    assert said[1].startswith("Rows have no llama.cpp: tiny-solver has no files")


class Native(ModuleType):
    """llama.cpp's C interface as far as loading a file goes."""

    __version__, LLAMA_FTYPE_MOSTLY_Q8_0, quantised = "3.4", 7, []

    def llama_model_quantize(self, source, target, how):
        self.quantised.append((source, how.ftype, how.allow_requantize))
        Path(target.decode()).write_bytes(b"q8")
        return 0

    def llama_model_load_from_file(self, file, params):
        return Path(file.decode()).read_bytes()

    def llama_model_desc(self, loaded, text, size):
        text.value = loaded

    def __getattr__(self, name):
        return lambda *_: SimpleNamespace()


def test_llama_cpp_is_timed_on_formats_of_its_own_quantiser(tmp_path, monkeypatch):
    """Written once, from the file that ours reads; what was loaded stands in the version."""
    monkeypatch.setitem(sys.modules, "llama_cpp", Native("llama_cpp"))
    (tmp_path / "model.gguf").write_bytes(b"q4_1")
    given = {"model": str(tmp_path / "model.gguf"), "threads": 2, "max_num_seqs": 1}
    given |= {"max_num_batched_tokens": 4, "max_model_len": 8}
    written = {"quantised": "Q8_0", "written": str(tmp_path / "q8.gguf")}
    found = [peers.LlamaCpp(**given, **more).version for more in ({}, written, written)]
    told = "2 threads, flash attention by default)"
    assert found == [f"3.4 (q4_1, {told}", *[f"3.4 (q8, {told}"] * 2]
    assert Native.quantised == [(given["model"].encode(), 7, True)]


def test_a_peer_has_the_variants_that_the_processor_multiplies(monkeypatch):
    """Each is a contender of its own; a host held to a lesser set multiplies no bfloat16."""
    small = Work(1, 4, 2), Work(1, 8)
    for features, forced, names in (
        ("avx2", "avx512", [TRANSFORMERS]),
        ("avx512_bf16", "avx2", [TRANSFORMERS]),
        ("avx512_bf16", "avx512", [TRANSFORMERS, f"{TRANSFORMERS}-bfloat16"]),
    ):
        monkeypatch.setattr(engine, "cpu_features", lambda features=features: (features,))
        monkeypatch.setenv(engine.FORCED, forced)
        found = EngineBench("tiny-solver", small, 1).labels
        assert [name for name in found if name != "products"] == names
    assert "(bfloat16, " in found[f"{TRANSFORMERS}-bfloat16"]
    assert "(float32, " in found[TRANSFORMERS] and "SDPA, not compiled)" in found[TRANSFORMERS]


def test_peers_are_chosen_by_name_and_an_unknown_one_is_refused():
    """Guards the option --peers; what each needs is listed in .ci."""
    assert chosen_peers("none") == []
    assert chosen_peers("installed") == [TRANSFORMERS, *PEERS]
    assert chosen_peers("llama.cpp, vllm") == ["llama.cpp", "vllm"]
    with pytest.raises(ConfigError, match=r"peers is 'vlm'.*Did you mean 'vllm'"):
        chosen_peers("vlm")
    lists = Path(__file__).parents[2] / ".ci"
    named = {f"peers.{name}.txt" for name in (*PEERS, *SYSTEMS)}
    assert {path.name for path in lists.glob("peers.*.txt")} == named


def test_a_gguf_model_becomes_a_folder_with_the_same_values_once(tmp_path):
    """Guards that peers which read no GGUF compute with exactly our weights; a folder stays."""
    tensors = random_tensors()
    file = write_gguf(tmp_path / "small.gguf", tensors, about=TOKENS)
    folder, gguf = files = peer_files(str(file), tmp_path / "written")
    assert gguf == file
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[n], torch.from_numpy(t)) for n, t in tensors.items())
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", 64)
    assert (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file()
    before = (folder / "config.json").stat().st_mtime_ns
    assert peer_files(str(file), tmp_path / "written") == files
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "written").iterdir()] == [folder.name]
    folder, gguf = peer_files("tiny-solver", tmp_path / "none")
    assert (gguf, folder.name, (tmp_path / "none").exists()) == (None, "tiny-solver", False)
