"""Other systems as peers, each in a process and environment of its own: both ends of the pipe.

`make bench-peers` makes the environments under build/peers. A worker is this file, run by the
peer's interpreter, which has no workbench: nothing of it is imported here. A request is a mapping,
and so is its reply; what goes wrong is {"error": text}. The first loads the model: keyword
arguments of a class below -> {"version": text}. All others are of an engine's `timed`, {"prompts":
[[id]], "new_tokens": n} -> {"tokens": n, "seconds": s}: of what comes after every sequence's first
token (of one new token: until it); or of a search system's `search`. They compute in turns.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

SETTLE_SECONDS = 0.3  # OpenMP threads spin for up to 0.2 s after their last work
SHOWN = 400  # characters of a failed worker's last words
LARGEST_COMPUTE = 512  # tokens llama.cpp computes at a time, its own default (n_ubatch)


class PeerError(RuntimeError):
    """A peer that is not installed, cannot load the model, or failed while it was measured."""


class PeerProcess:
    """A worker with one model loaded; a Contender of the engine benchmark. Close it when done."""

    def __init__(
        self, name: str, folder: Path, settings: Mapping[str, Any], kv_bytes: int = 1
    ) -> None:
        """Starts the worker and loads the model. kv_bytes: as of `interpreter`. Raises PeerError
        with the reason.
        """
        python, environment = interpreter(name, folder, settings["threads"], kv_bytes)
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._pipe, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [python, __file__, name, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[there.fileno()],
                env=environment,
            )
        try:
            self.version = self.ask(settings, "load")["version"]
        except BaseException:  # an interrupt, too: no worker is left behind
            self.close()
            raise

    def timed(self, prompts: Any, new_tokens: int) -> tuple[int, float]:
        """Tokens, and seconds by the worker's clock."""
        found = self.ask({"prompts": prompts.tolist(), "new_tokens": new_tokens}, "timed")
        time.sleep(SETTLE_SECONDS)
        return found["tokens"], found["seconds"]

    def close(self) -> None:
        """Ends the worker: at its next request if it can, else at once."""
        self._pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, request: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """The worker's reply. doing: what a PeerError calls the request."""
        try:
            self._pipe.send(request)
            found: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            raise PeerError(f"{self.name} ended at {doing!r}: {last_words(self._log)}") from None
        if "error" in found:
            raise PeerError(f"{self.name} failed at {doing!r}: {found['error']}")
        return found


def interpreter(
    name: str, folder: Path, threads: int, kv_bytes: int = 1
) -> tuple[Path, dict[str, str]]:
    """The Python of a peer's environment and what it runs with; PeerError where there is none.
    kv_bytes: of a vLLM's KV, at least; it has whole GiB.
    """
    home = folder / HOMES.get(name, name)
    python = home / "bin" / "python"
    if not python.exists():
        raise PeerError(f"{name} is not installed: there is no {python}; run `make bench-peers`.")
    affinity = getattr(os, "sched_getaffinity", lambda process: range(threads))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(affinity(0))[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": f"{-(-kv_bytes // 2**30)}",
        # It dies of code that it compiled for other settings, so it compiles anew.
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # without which a server's cache cannot be emptied
    }
    openmp = home / "lib" / "libiomp5.so"  # Intel's: what vLLM asks for on a CPU
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp.absolute())
    return python, environment


def last_words(log: IO[str]) -> str:
    """The end of what a process wrote."""
    log.seek(0)
    return " ".join(log.read()[-SHOWN:].split()) or "it said nothing"


class LlamaCpp:
    """A .gguf file in llama.cpp, through its C interface as llama-cpp-python binds it.

    A step is one llama_decode of a token a sequence and the largest logit of each. Settings: flash
    attention and fp16 keys and values as llama.cpp chooses by default, the same threads for one
    token and for many. quantised: the file is first written anew in that format, by llama.cpp's own
    quantiser, unless `written` is there.
    """

    def __init__(
        self,
        model: str,
        threads: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        quantised: str = "",
        written: str = "",
    ) -> None:
        import llama_cpp as api  # noqa: PLC0415 - of the worker's environment

        self._api: Any = api
        api.llama_backend_init()
        if quantised and not os.path.isfile(written):
            how = api.llama_model_quantize_default_params()
            how.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{quantised}")
            how.allow_requantize = True  # what the file's format rounded stays rounded
            if api.llama_model_quantize(model.encode(), f"{written}.part".encode(), how):
                raise RuntimeError(f"llama.cpp cannot write {model} as {quantised}")
            os.replace(f"{written}.part", written)
        model = written or model
        loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        kind = ctypes.create_string_buffer(128)
        api.llama_model_desc(loaded, kind, len(kind))
        told = f"{kind.value.decode()}, {threads} threads, flash attention by default"
        self.version = f"{api.__version__} ({told})"
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = max_num_seqs * max_model_len, max_num_seqs
        params.n_batch, params.n_ubatch = max_num_batched_tokens, LARGEST_COMPUTE
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no room for {params.n_ctx} positions")
        self._batch = api.llama_batch_init(max_num_batched_tokens, 0, 1)

    def timed(self, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        start = time.perf_counter()
        tokens = self._step(prompts, 0)
        first, position = time.perf_counter(), len(prompts[0])
        if new_tokens == 1:
            return len(prompts) * position, first - start
        for step in range(new_tokens - 1):
            tokens = self._step([[int(token)] for token in tokens], position + step)
        return len(prompts) * (new_tokens - 1), time.perf_counter() - first

    def _step(self, rows: list[list[int]], position: int) -> Any:
        """Computes each sequence's next tokens; the likeliest token after each, [sequences]."""
        import numpy as np  # noqa: PLC0415 - of the worker's environment

        batch, place = self._batch, 0
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = position + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
        batch.n_tokens = place
        code = self._api.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {place} tokens")
        logits = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(len(rows), self._vocab)).argmax(axis=1)


class Vllm:
    """A Hugging Face folder in vLLM's CPU build, its offline engine stepped by hand.

    Decoding begins after the step in which the last sequence got its first token. Settings: dtype,
    prefix caching off, all prompts of a batch in one step, no detokenisation, torch.compile and
    attention as vLLM has them by default, threads bound to this process's cores.
    """

    def __init__(self, model: str, threads: int, dtype: str = "float32", **limits: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # noqa: PLC0415 - reads the environment when it is imported

        told = f"{dtype}, {threads} threads, attention and torch.compile by default"
        self.version = f"{vllm.__version__} ({told})"
        self._sampling = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **limits,
        ).llm_engine
        self._next = 0

    def timed(self, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        lengths, start = dict[str, int](), time.perf_counter()
        params = self._sampling(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self._engine.add_request(str(self._next), {"prompt_token_ids": prompt}, params.clone())
            self._next += 1
        before = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if before == 0 and len(lengths) == len(prompts) and new_tokens > 1:
                before, start = sum(lengths.values()), time.perf_counter()
        seconds = time.perf_counter() - start
        if new_tokens == 1:
            return sum(map(len, prompts)), seconds
        return sum(lengths.values()) - before, seconds


class SearchAndLearn:
    """huggingface/search-and-learn's own searches: strategies and reward model of a checkout.

    Both models are handed to its functions as its script does (scripts/test_time_compute.py): vLLM
    with its prefix cache, in this process, and its PRM class in RLHFlow's form over transformers,
    in batches of its own size. Its chat template is Llama's: here it is the model's own.
    packages: what it imports and vLLM's environment lacks. config: fields of its Config.
    """

    def __init__(
        self,
        checkout: str,
        packages: str,
        model: str,
        prm: str,
        threads: int,
        dtype: str,
        config: dict[str, Any],
        **limits: int,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        sys.path += [os.path.join(checkout, "src"), packages]
        import torch  # noqa: PLC0415 - of the worker's environment, all of these
        import transformers  # noqa: PLC0415
        import vllm  # noqa: PLC0415
        from sal import search  # noqa: PLC0415
        from sal.config import Config  # noqa: PLC0415
        from sal.models.reward_models import RLHFFlow  # noqa: PLC0415

        class Judge(RLHFFlow):  # type: ignore[misc]
            """Theirs, but of the model that is given; its seconds and rows are kept."""

            def load_model_and_tokenizer(self, **_: Any) -> tuple[Any, Any]:
                tokenizer = transformers.AutoTokenizer.from_pretrained(prm, padding_side="right")
                tokenizer.pad_token = tokenizer.eos_token
                loaded = transformers.AutoModelForCausalLM.from_pretrained(
                    prm, dtype=getattr(torch, dtype)
                )
                self.candidate_tokens = [tokenizer.encode(verdict)[-1] for verdict in "+-"]
                loaded.register_forward_pre_hook(lambda _, given: keep(given[0], tokenizer))
                return loaded.eval(), LikeLlamas(tokenizer, torch)

            def score(self, *given: Any, **more: Any) -> Any:
                start = time.perf_counter()
                found = super().score(*given, **more)
                counts["prm_s"] += time.perf_counter() - start
                return found

        def keep(rows: Any, tokenizer: Any) -> None:
            for row in rows.tolist():
                while row[-1] == tokenizer.pad_token_id:
                    row.pop()
                self._rows.append(tuple(row))

        counts = self._counts = defaultdict[str, float](float)
        self._rows: list[tuple[int, ...]] = []  # that the reward model computed, without padding
        torch.set_num_threads(threads)
        self._searches = {k: getattr(search, k) for k in ("beam_search", "best_of_n", "dvts")}
        self._config = self._now = Config(custom_chat_template=None, **config)
        self._prm = Judge(self._config)
        how = {"enable_prefix_caching": True, "seed": self._config.seed, **limits}
        self._llm: Any = vllm.LLM(model, dtype=dtype, **how)
        self.get_tokenizer = self._llm.get_tokenizer
        told = f"{dtype}, {threads} threads, vllm {vllm.__version__}, "
        self.version = f"{told}transformers {transformers.__version__}"

    def search(self, problems: list[str], **changes: Any) -> dict[str, Any]:
        """Seconds and tokens of a search over the problems, from an empty prefix cache, in
        batches of Config.search_batch_size; and of each problem what it found, as texts and the
        scores of their steps. changes: of Config.
        """
        config = self._now = self._prm.search_config = replace(self._config, **changes)
        self._llm.reset_prefix_cache()
        counts, each, solved = self._counts, config.search_batch_size, list[Any]()
        counts.clear()
        for batch in (problems[k : k + each] for k in range(0, len(problems), each)):
            self._rows.clear()
            start = time.perf_counter()
            ask = self._searches[config.approach]
            found = ask({"problem": batch}, config=config, llm=self, prm=self._prm)
            counts["wall_s"] += time.perf_counter() - start
            counts["prm_computed"] += sum(map(len, self._rows))
            beginnings = set[int]()  # nodes of the trie, by the hash of their tokens
            for row in self._rows:
                beginnings.update(accumulate(row, lambda *pair: hash(pair)))
            counts["prm_distinct"] += len(beginnings)
            solved += zip(found["completions"], found["scores"])
        return dict(counts) | {"solved": solved}

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool = False) -> Any:
        """vllm.LLM's, which its searches call, counted. Its DVTS asks for 2,048 tokens a step
        whatever its Config says: no request gets more than Config.max_tokens.
        """
        start, params = time.perf_counter(), sampling_params
        params.max_tokens = min(params.max_tokens, self._now.max_tokens)
        outputs = self._llm.generate(prompts, params, use_tqdm=use_tqdm)
        self._counts["tokens"] += sum(len(output.outputs[0].token_ids) for output in outputs)
        self._counts["llm_s"] += time.perf_counter() - start
        return outputs


class LikeLlamas:
    """A tokenizer as its RLHFlow class reads one: a begin-of-sequence token before a text, "ки" as
    one token (whose id no model is shown), and chats as transformers 4 returned them.
    """

    def __init__(self, tokenizer: Any, torch: Any) -> None:
        self._tokenizer, self._torch = tokenizer, torch
        tokenizer.add_tokens(["ки"], special_tokens=True)

    def __call__(self, text: str, **how: Any) -> Any:
        ids = self._tokenizer(text, **how).input_ids
        return SimpleNamespace(input_ids=self._torch.nn.functional.pad(ids, (1, 0)))

    def apply_chat_template(self, chats: Any, **how: Any) -> Any:
        """Token ids, a tensor."""
        return self._tokenizer.apply_chat_template(chats, return_dict=False, **how)


PEERS: dict[str, Any] = {"vllm": Vllm, "llama.cpp": LlamaCpp}  # engines, by the name in the rows
SYSTEMS: dict[str, Any] = {"search-and-learn": SearchAndLearn}
HOMES = {"search-and-learn": "vllm"}  # peers that run in another's environment


def serve(engine: Any, pipe: Connection) -> None:
    """Load the model, then time until the other end is closed."""
    peer: Any = None
    reply: dict[str, Any]
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if peer is None:
                peer = engine(**request)
                reply = {"version": peer.version}
            elif "problems" in request:
                reply = peer.search(**request)
            else:
                tokens, seconds = peer.timed(**request)
                reply = {"tokens": tokens, "seconds": seconds}
        except Exception as error:  # the benchmark goes on without this peer, and says why
            reply = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(reply)


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules must not hide the peer's own
    serve((PEERS | SYSTEMS)[sys.argv[1]], Connection(int(sys.argv[2])))
