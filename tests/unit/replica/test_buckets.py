from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from guava_nb.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from guava_nb.outer_methods.outer_methods import sparse_format
from guava_nb.protocol.messages import FlatTensor, ParameterBucket, SumBucket
from guava_nb.replica.buckets import BUFFERS, BucketWire, build_layout, pack_present, present_at


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.double = nn.Linear(4, 4).double()
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_parameters_stand_once_in_reverse_order_by_wire_dtype() -> None:
    layout = build_layout(Tied(), 1 << 20)
    assert [b.dtype for b in layout.buckets] == [torch.float64, torch.float32]
    assert layout.buckets[0].names == ("double.bias", "double.weight")
    assert layout.buckets[1].names == ("half.bias", "half.weight", "norm.bias", "norm.weight", "embed.weight")
    assert layout.buffers is not None and layout.numbers == (0, 1, BUFFERS)
    statistics = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert layout.bucket(BUFFERS).names == (*statistics, "frozen.weight", "frozen.bias")  # a forward may move these too
    assert layout.bucket(BUFFERS).whole_numbers == {2} and layout.bucket(BUFFERS).dtype == torch.float32


def test_buckets_close_at_their_size_and_a_large_parameter_has_its_own() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.Linear(8, 1000))
    layout = build_layout(model, 600)
    for bucket in layout.buckets:
        assert len(bucket.names) == 1 or bucket.numel * 4 <= 600
    names = [name for bucket in layout.buckets for name in bucket.names]
    assert names == [name for name, _ in reversed(list(model.named_parameters()))]


def test_the_digest_sees_names_shapes_dtypes_buckets_and_freezing() -> None:
    def digest(change=lambda m: None, bucket_bytes: int = 1 << 20) -> str:
        model = Tied()
        change(model)
        return build_layout(model, bucket_bytes).digest()

    assert digest() == digest()
    others = [
        digest(bucket_bytes=64),
        digest(lambda m: m.head.requires_grad_(False)),
        digest(lambda m: setattr(m, "frozen", nn.Linear(4, 5).requires_grad_(False))),
        digest(lambda m: m.register_buffer("mask", torch.zeros(3))),
        digest(lambda m: setattr(m, "double", nn.Linear(4, 4))),
    ]
    assert len({digest(), *others}) == 6


def test_views_share_the_flat_tensor_and_check_its_size() -> None:
    bucket = build_layout(nn.Linear(3, 2), 1 << 20).buckets[0]
    flat = torch.arange(8.0)
    views = bucket.views(flat)
    assert [tuple(v.shape) for v in views] == [(2,), (2, 3)]
    views[1][0, 0] = float("nan")
    assert bucket.not_finite(flat, b"") == ["weight"]
    with pytest.raises(LocalProtocolError, match="8 elements, 7 came"):
        bucket.views(flat[:7])
    with pytest.raises(LocalProtocolError, match="no bucket 3"):
        build_layout(nn.Linear(3, 2), 1).bucket(3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_presence_bits_come_back(bits: list[bool]) -> None:
    packed = pack_present(bits)
    assert len(packed) == (len(bits) + 7) // 8
    assert present_at(packed, len(bits)) == bits
    if bits and bits[0]:
        assert packed[0] & 1
    with pytest.raises(LocalProtocolError):
        present_at(packed + b"\0", len(bits))


def test_lazy_layers_are_refused_and_a_frozen_model_has_no_buckets() -> None:
    with pytest.raises(ConfigError, match="lazy layer"):
        build_layout(nn.LazyLinear(3), 1 << 20)
    layout = build_layout(nn.Linear(2, 2).requires_grad_(False), 1 << 20)
    assert layout.numbers == ()


def test_forwarded_messages_come_to_the_same_bits_at_all_and_one_that_is_missing_is_a_violation() -> None:
    layout = build_layout(nn.Linear(90, 90), 1 << 20, sparse := sparse_format())
    flats = [torch.randn(layout.buckets[0].numel) for _ in range(2)]
    senders = [BucketWire(layout, sparse, 0.95) for _ in flats]
    sent = [
        wire.encode(0, flat, (0, 5, shard))[1] for shard, (wire, flat) in enumerate(zip(senders, flats, strict=True))
    ]
    hub = BucketWire(layout, sparse)
    assert hub.is_forwarded(0, 2) and not hub.is_forwarded(0, 3)

    def came(*shards: int, payload: bytes = b"") -> Any:
        body = memoryview(payload or b"".join(sent[shard] for shard in shards))
        tensor = FlatTensor("uint8", len(body))
        return SumBucket(
            run_id="r", generation=0, step=5, bucket=0, present=b"\3", tensor=tensor, shards=2, forwarded=shards
        ), body  # fmt: skip

    idle = BucketWire(layout, sparse)
    total = idle.decode_sum(*came(0, 1))
    for shard, wire in enumerate(senders):
        assert torch.equal(wire.decode_sum(*came(1 - shard)), total)
    assert torch.equal(total, sum(sparse.decode(one, len(flats[0])) for one in sent))  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="without the message of shard 1"):
        idle.decode_sum(*came(0))
    with pytest.raises(RemoteProtocolError, match="bytes came for 1 messages"):
        idle.decode_sum(*came(0, payload=bytes(sent[0]) + b"0"))
    senders[0].commit()
    with pytest.raises(RemoteProtocolError, match="without the message of shard 0"):
        senders[0].decode_sum(*came(1))


@pytest.mark.parametrize("kind", [SumBucket, ParameterBucket])
def test_a_worker_owes_nothing_of_a_message_in_whose_place_another_worker_s_counted(kind: Any) -> None:
    """It was away while another one did its shard; what it owed before it owes still, and not what that one owes now."""
    layout = build_layout(nn.Linear(90, 90), 1 << 20, sparse := sparse_format())
    worker, (first, second, later) = BucketWire(layout, sparse), torch.randn(3, layout.buckets[0].numel)
    worker.encode(0, first, (1, 4, 0))
    worker.commit()
    before = worker.rests()["0"].clone()
    worker.encode(0, second, (1, 5, 0))
    head = {"run_id": "r", "generation": 1, "bucket": 0, "present": b"\3", "tensor": layout.buckets[0].form(len(first))}
    worker.note_void(kind(step=6, void=((0, 0),), **head))  # of a step that comes later
    worker.note_void(kind(step=5, void=((0, 0), (7, 3)), **head))
    worker.commit()
    assert torch.equal(worker.rests()["0"], before)
    worker.encode(0, later, (1, 6, 0))
    worker.commit()
    assert torch.equal(worker.rests()["0"], before) and worker._void == set()
    worker.encode(0, later, (1, 7, 0))
    worker.commit()
    assert not torch.equal(worker.rests()["0"], before)


def test_a_hub_that_owes_sends_its_sum_whatever_is_shorter() -> None:
    layout = build_layout(nn.Linear(90, 90), 1 << 20, sparse := sparse_format())
    hub, other, flat = BucketWire(layout, sparse), BucketWire(layout, sparse), torch.randn(layout.buckets[0].numel)
    tensor, payload = hub.encode(0, flat)
    assert not hub.is_forwarded(0, 2)
    message = SumBucket(run_id="r", generation=0, step=0, bucket=0, present=b"\3", tensor=tensor)
    assert tensor == layout.buckets[0].form(len(flat))
    arrived = other.decode_sum(message, payload)
    assert float((flat - arrived).norm()) == pytest.approx(hub.owed_norm(), rel=1e-6)
    hub.discard()
    assert hub.is_forwarded(0, 2) and hub.owed_norm() == 0


def test_the_mean_of_senders_goes_down_exact_where_that_is_shorter_than_all_messages() -> None:
    layout = build_layout(nn.Linear(90, 90), 1 << 20, partial := sparse_format(of_senders=True))
    hub, worker, bucket = BucketWire(layout, partial), BucketWire(layout, partial), layout.buckets[0]
    assert hub.is_forwarded(0, 150) and not hub.is_forwarded(0, 250)
    mean = torch.randn(bucket.numel)
    tensor, payload = hub.encode_sum(0, mean)
    assert tensor == bucket.form_down(bucket.numel) and hub.owed_norm() == 0
    message = SumBucket(run_id="r", generation=0, step=0, bucket=0, present=b"\3", tensor=tensor)
    assert torch.equal(worker.decode_sum(message, payload), mean)
    with pytest.raises(RemoteProtocolError):
        worker.decode_sum(message, payload[:-4])


def test_a_flat_tensor_of_another_form_is_a_violation_of_its_sender() -> None:
    layout = build_layout(Tied(), 1 << 20)
    bucket, buffers = layout.bucket(0), layout.bucket(BUFFERS)
    present = pack_present([True] * len(bucket.names))
    bucket.check_form(FlatTensor("float64", bucket.numel), present)
    some = pack_present([i == 0 for i in range(len(buffers.names))])
    buffers.check_form(FlatTensor(str(buffers.dtype).removeprefix("torch."), buffers.sizes[0]), some)
    for tensor, bits in (
        (FlatTensor("float32", bucket.numel), present),
        (FlatTensor("float64", bucket.numel - 1), present),
        (FlatTensor("float64", bucket.numel), b""),
        (FlatTensor("float64", bucket.numel), present + b"\0"),
    ):
        with pytest.raises(RemoteProtocolError, match="bucket 0 has"):
            bucket.check_form(tensor, bits)
    with pytest.raises(RemoteProtocolError, match="bucket -1 has"):
        buffers.check_form(FlatTensor(str(buffers.dtype).removeprefix("torch."), buffers.numel), some)
