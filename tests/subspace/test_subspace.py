"""Subspace: dtypes, devices, identity and memory."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

from fairfold.kernels.reference import BLOCK, TEMPORARY_BYTES
from fairfold.subspace import Subspace, reduce_all
from tests.support.strategies import vector


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_keeps_its_sums_in_at_least_float32(dtype: torch.dtype) -> None:
    subspace = Subspace(40_000, 10, seed=1, sign=False)  # 4,000 values a slot: half-precision sums would stall
    full = (1 + vector(40_000, 3) / 10).to(dtype)
    compact = subspace.reduce(full)
    assert compact.dtype == dtype
    assert subspace.recover(compact).dtype == dtype
    exact = subspace.reduce(full.double())
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(
        compact.double(), exact, rtol=max(2 * epsilon, 1e-12 if dtype == torch.float64 else 1e-5), atol=0
    )
    assert subspace.sums_and_counts(full)[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_what_the_cpu_gives() -> None:
    full = vector(300_000, dtype=torch.float32)
    for mapping, chunk in (("element", 1), ("chunk", 8), ("ranked", 4)):
        subspace = Subspace(300_000, 3_200, 5, mapping, chunk)
        on_cpu, on_gpu = subspace.reduce(full), subspace.reduce(full.cuda())
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)
        assert torch.equal(subspace.recover(on_gpu).cpu(), subspace.recover(on_gpu.cpu()))


def test_vectors_longer_than_a_block_and_strided_ones() -> None:
    length = 2 * BLOCK + 17
    subspace = Subspace(length, 1_000, seed=2)
    wide = vector(2 * length).view(length, 2)
    strided = wide[:, 1]
    slots, signs = subspace.slots(0, length)
    sums = torch.zeros(1_000, dtype=torch.float64).index_add_(0, slots, strided * signs)
    torch.testing.assert_close(subspace.reduce(strided), sums / torch.bincount(slots, minlength=1_000))


def test_equal_subspaces_are_one_key_and_travel() -> None:
    first, second = Subspace(100, 20, seed=3, mapping="ranked"), Subspace(100, 20, seed=3, mapping="ranked", head=10)
    assert first == second
    assert len({first, second, copy.deepcopy(first), pickle.loads(pickle.dumps(second))}) == 1
    assert first != Subspace(100, 20, seed=4, mapping="ranked")
    assert eval(repr(first)) == first


def test_gradients_do_not_follow() -> None:
    full = torch.randn(100, requires_grad=True)
    assert not Subspace(100, 20).reduce(full).requires_grad


def test_reduce_all_of_nothing_and_of_the_same() -> None:
    full, subspace = torch.randn(100), Subspace(100, 20)
    assert reduce_all(full, []) == {}
    assert list(reduce_all(full, [subspace, Subspace(100, 20)])) == [subspace]


PEAK = """
import resource, sys, torch
from fairfold import Subspace
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
n, m, chunk = {n}, {m}, {chunk}
subspace = Subspace(n, m, seed=1, mapping={mapping!r}, chunk=chunk)
small = Subspace(64 * chunk, 16 * chunk, seed=1, mapping={mapping!r}, chunk=chunk)
small.recover(small.reduce(torch.ones(64 * chunk)))  # threads and buffers that come with the first use
before = peak()
full = torch.empty(n).fill_(1.0)
compact = subspace.reduce(full)
after_reduce = peak()
subspace.recover(compact, out=full)
print(after_reduce - before, peak() - before)
"""


def measured_growth(n: int, m: int, mapping: str, chunk: int = 1) -> tuple[int, int]:
    script = textwrap.dedent(PEAK.format(n=n, m=m, mapping=mapping, chunk=chunk))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    reduce_growth, recover_growth = done.stdout.split()
    return int(reduce_growth), int(recover_growth)


@pytest.mark.parametrize(("mapping", "chunk"), [("element", 1), ("chunk", 16), ("ranked", 1)])
def test_temporary_memory_is_bounded(mapping: str, chunk: int) -> None:
    """Full vector, sums and counts, and a bound that does not depend on n (an index of it would be 128 MB)."""
    n = 16_000_000
    m = n // 16 // (2 * chunk) * 2 * chunk
    slack = TEMPORARY_BYTES + 24 * 2**20  # what the allocator and the finite check keep beside it
    reduce_growth, recover_growth = measured_growth(n, m, mapping, chunk)
    assert reduce_growth < 4 * n + 4 * 4 * m + slack
    assert recover_growth < 4 * n + 4 * 4 * m + slack


@pytest.mark.slow
def test_a_hundred_million_coordinates_need_full_plus_compact_plus_256_mb() -> None:
    n = 100_000_000
    for growth in measured_growth(n, n // 16, "element"):
        assert growth < 4 * n + 4 * (n // 16) + 256 * 10**6
