"""Peers in processes of their own: the pipe, what is left out and why, and the files they read."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.gguf_making import random_tensors, write_gguf
from workbench.bench import peer_process
from workbench.bench.lineup import _chosen
from workbench.bench.peer_models import peer_files
from workbench.bench.peer_process import PEERS, WORKER, PeerError, PeerProcess, interpreter
from workbench.errors import ConfigError

FAKE = '''
"""An engine of exact rates that is noisy, and fails when asked to."""
import os


class Peer:
    version = "1.2"

    def __init__(self, model, threads):
        os.write(1, b"noise\\n")
        if model == "none":
            raise ValueError("no such model")
        self.threads = threads

    def decode(self, prompts, new_tokens):
        print("more noise")
        return len(prompts) * new_tokens, 2.0

    def prefill(self, prompt):
        if prompt[0] == 13:
            os.write(2, b"out of luck")
            os._exit(3)
        return len(prompt), 0.5
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Starts a fake peer behind the real worker script; ended after the test."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "WORKER", shutil.copy(WORKER, tmp_path))
    monkeypatch.setattr(peer_process, "SETTLE_SECONDS", 0)
    monkeypatch.setitem(PEERS, "fake", "fake_peer")
    started = []

    def start(model="some"):
        started.append(PeerProcess("fake", Path(sys.executable), 2, {"model": model}))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


def test_a_peer_answers_rates_whatever_it_prints(fake):
    """Guards the protocol: noise on standard output never mixes with the answers."""
    peer = fake()
    assert peer.version == "1.2"
    assert peer.decode(np.zeros((3, 4), np.int64), 10) == 15.0
    assert peer.prefill(np.zeros((1, 8), np.int64)) == 16.0


def test_a_peer_that_cannot_load_says_why(fake):
    """Guards that a peer's own reason reaches whoever reads why its rows are absent."""
    with pytest.raises(PeerError, match="fake failed at 'load': ValueError: no such model"):
        fake("none")


def test_a_peer_that_dies_is_named_with_its_last_words(fake):
    """Guards against waiting for ever on a worker that has crashed."""
    peer = fake()
    with pytest.raises(PeerError, match=r"fake ended at 'prefill': .*out of luck"):
        peer.prefill(np.full((1, 2), 13))


def test_a_peer_that_is_not_installed_names_the_command(tmp_path):
    """Guards that a missing environment tells how to make it."""
    with pytest.raises(PeerError, match="make bench-peers"):
        interpreter("vllm", tmp_path)
    assert interpreter("transformers_cb", tmp_path) == Path(sys.executable)


def test_peers_are_chosen_by_name_and_an_unknown_one_is_refused():
    """Guards the option --peers."""
    assert _chosen("none") == []
    assert _chosen("installed") == list(PEERS)
    assert _chosen("llama.cpp, vllm") == ["llama.cpp", "vllm"]
    with pytest.raises(ConfigError, match=r"no peer 'vlm'.*Did you mean 'vllm'"):
        _chosen("vlm")


def test_every_peer_has_its_module_and_those_with_an_environment_a_list():
    """Guards that names, worker modules and the requirement lists stay together."""
    for name, module in PEERS.items():
        assert (WORKER.parent / f"{module}.py").is_file()
        own = name in peer_process.OWN_INTERPRETER
        assert (WORKER.parent / f"{name}.txt").is_file() != own


def test_a_gguf_model_becomes_a_folder_with_the_same_values_once(tmp_path):
    """Guards that peers which read no GGUF compute with exactly our weights."""
    tensors = random_tensors()
    file = write_gguf(tmp_path / "small.gguf", tensors)
    files = peer_files(str(file), tmp_path / "written")
    assert files.gguf == file
    written = load_file(files.folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[n], torch.from_numpy(t)) for n, t in tensors.items())
    config = json.loads((files.folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", 64)
    before = (files.folder / "config.json").stat().st_mtime_ns
    assert peer_files(str(file), tmp_path / "written") == files
    assert (files.folder / "config.json").stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "written").iterdir()] == [files.folder.name]


def test_a_folder_is_read_where_it_is(tmp_path):
    """Guards that a model which is a folder already is not written a second time."""
    files = peer_files("tiny-solver", tmp_path)
    assert (files.gguf, files.folder.name) == (None, "tiny-solver")
    assert list(tmp_path.iterdir()) == []
