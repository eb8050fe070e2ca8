"""A peer as a process: one JSON object a line in, one out, strictly in turns.

Run by path, `python worker.py vllm_peer`, with the interpreter of the peer's own environment. The
module named (beside this file) has a class Peer; commands are

    {"command": "load", ...}                               -> {"version": text}; Peer(**the rest)
    {"command": "decode", "prompts": [[id]], "new_tokens": n} -> {"tokens": n, "seconds": s}
    {"command": "prefill", "prompt": [id]}                 -> {"tokens": n, "seconds": s}
    {"command": "quit"}

and what goes wrong is {"error": text}. Whatever a peer prints goes to standard error, so it never
mixes with the answers. What it does not do: time anything; each peer states how it is timed.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any, TextIO


def main(module: str) -> None:
    """Answer commands until `quit` or the end of the input."""
    answers = _keep_standard_output()
    peer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        if command == "quit":
            break
        try:
            if command == "load":
                peer = import_module(module).Peer(**request)
                answer = {"version": peer.version}
            else:
                tokens, seconds = getattr(peer, command)(**request)
                answer = {"tokens": tokens, "seconds": seconds}
        except Exception as error:  # the benchmark goes on without this peer, and says why
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _keep_standard_output() -> TextIO:
    """A private copy of standard output; file descriptor 1 itself becomes standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


if __name__ == "__main__":
    main(sys.argv[1])
