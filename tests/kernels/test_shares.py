"""A CPU's threads shared by two engines: fewer threads, the same numbers, recorded or not."""

import torch

from workbench.kernels.cpu import CpuKernels


def test_a_share_of_the_threads_computes_the_same() -> None:
    """Recorded work runs with all threads, with half of them, and with all again."""
    kernels = CpuKernels(2)
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64), torch.randn(96, 64)
    matrix, out = kernels.pack([weight]), torch.empty(4, 96)
    run = kernels.record(lambda: kernels.multiply(x, matrix, out))
    found, threads = [], []
    for parts in (1, 2, 4, 1):
        kernels.use_part(parts)
        threads.append(kernels.team.threads)
        run()
        found.append(out.clone())
        out.zero_()
    assert threads == [2, 1, 1, 2]
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.allclose(found[0], x @ weight.T, atol=1e-4)
