"""Other engines, each run as a worker in an environment of its own (`make bench-peers`).

`worker.py` is the process; one module an engine beside it, importing nothing of the workbench,
which that environment does not have. `workbench.bench.peer_process` is the other end of the pipe.
"""
