from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.hub.bucket_sum import BucketSum, is_finite, square_sum


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(1000, generator=generator) * 10**k for k in range(4)]
    results = []
    for order in itertools.permutations(range(4)):
        total = BucketSum(4)
        for shard in order:
            total.add(shard, parts[shard].clone(), bytes([1 << shard]))
        assert total.complete
        present, value = total.result(1)
        assert present == b"\x0f"
        results.append(value)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_incomplete_until_the_last_shard() -> None:
    total = BucketSum(2)
    total.add(1, torch.ones(3), b"\x01")
    assert not total.complete
    total.add(0, torch.ones(3), b"\x00")
    assert total.complete and total.result(1)[1].tolist() == [2.0, 2.0, 2.0]


def test_half_precision_gradients_do_not_overflow_in_the_sum() -> None:
    # 8 workers with gradients of 2e4: fp16 would give inf; they arrive as float32.
    total = BucketSum(8)
    for shard in range(8):
        total.add(shard, torch.full((4,), 2e4, dtype=torch.float16).float(), b"\x01")
    assert total.result(1)[1].tolist() == [1.6e5] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_bad_element_is_seen(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(10_001, dtype=dtype)
    assert is_finite(tensor)
    tensor[7_777] = bad
    assert not is_finite(tensor)


def test_a_sum_that_overflows_is_not_a_bad_element() -> None:
    assert is_finite(torch.full((100,), 3e38))
    assert is_finite(torch.empty(0)) and is_finite(torch.tensor([2**62, 2**62]))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.complex128]),
    st.integers(0, 9000),
    st.integers(2, 4),
)
def test_sums_and_squares_are_those_of_torch(dtype: torch.dtype, size: int, shards: int) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = [(100 * torch.randn(size, generator=generator)).to(dtype) for _ in range(shards)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected.add_(part)
    total = BucketSum(shards)
    for shard, part in enumerate(parts):
        total.add(shard, part.clone(), b"\x01")
    assert torch.equal(total.result(1)[1], expected)
    exact = float((expected.to(torch.complex128).abs() ** 2).sum())
    assert dtype == torch.int64 or square_sum(expected) == pytest.approx(
        exact, rel=1e-5 if dtype.itemsize > 2 else 1e-2
    )


def test_a_sum_wakes_no_thread_for_every_core() -> None:
    """In a process of its own: this one's torch may have its threads already."""
    code = """
import psutil, torch
from guava_nb.hub.bucket_sum import BucketSum, is_finite, square_sum
torch.set_num_threads(8)
before = psutil.Process().num_threads()
total = BucketSum(2)
for shard in range(2):
    part = torch.frombuffer(bytearray(4 << 20), dtype=torch.float32)
    assert is_finite(part)
    total.add(shard, part, b"1")
square_sum(total.result(1)[1])
print(psutil.Process().num_threads() - before)
torch.ones(1 << 20).add_(torch.ones(1 << 20))
print(psutil.Process().num_threads() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    ours, torchs = map(int, done.stdout.split())
    assert ours == 0 < torchs


@pytest.mark.parametrize("of_senders", [False, True])
def test_sparse_contributions_come_to_what_dense_ones_do_and_to_the_mean_of_those_that_have_an_element(
    of_senders: bool,
) -> None:
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(500, generator=generator) * (torch.rand(500, generator=generator) < 0.2) for _ in range(3)]
    expected = sum(parts) / (sum((part != 0).int() for part in parts).clamp(min=1) if of_senders else 1)  # type: ignore[union-attr, arg-type]
    for order in itertools.permutations(range(3)):
        sparse, dense = BucketSum(3, of_senders), BucketSum(3, of_senders)
        for shard in order:
            assert is_finite(parts[shard].to_sparse())
            sparse.add(shard, parts[shard].to_sparse(), b"\1")
            dense.add(shard, parts[shard].clone(), b"\1")
        assert torch.equal(sparse.result(1)[1], dense.result(1)[1])
        assert torch.allclose(dense.result(1)[1], expected, atol=1e-6)  # type: ignore[arg-type]
    assert not is_finite(torch.tensor([0.0, float("nan")]).to_sparse())
