"""A session over connections that break anywhere: every message arrives exactly once, in order, within its window."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.protocol.framing import Decoder, Incoming
from guava_nb.protocol.messages import Channel, FlatTensor, GradientBucket
from guava_nb.protocol.resume import Inbox, Outbox
from tests.unit.protocol.wire_cases import examples, small_buffers

CHANNELS = (Channel.CONTROL, Channel.GRADIENT, Channel.BATCH)
CHUNK_BYTES = 64


class World:
    """One direction of a session: outbox, a pipe of bytes, a decoder, inbox, a consumer; and acks on their way back."""

    def __init__(self, window_bytes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.window_bytes = window_bytes
        self.outbox, self.inbox = Outbox(window_bytes), Inbox(window_bytes, window_bytes)
        self.expected: dict[Channel, list[bytes]] = defaultdict(list)
        self.delivered: dict[Channel, list[bytes]] = defaultdict(list)
        self.held: list[tuple[Channel, int]] = []
        self.acks: list = []
        self.written_bytes = 0
        self.goes_on = True  # the sender goes on within a message; one of an older version begins it anew
        self.connect({})

    def connect(self, begun: Mapping[int, Incoming]) -> None:
        self.pipe = bytearray()
        self.decoder = Decoder()
        self.decoder.carry(begun)
        self.lanes: dict[Channel, list] = {}

    def enqueue(self, size: int) -> None:
        channel = self.random.choice(CHANNELS)
        payload = self.random.randbytes(size)
        message = GradientBucket(
            run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", size)
        )
        self.outbox.enqueue(message, channel, [memoryview(payload)])
        self.expected[channel].append(payload)

    def take(self) -> None:
        busy = min(self.lanes, default=None)
        before = {channel: self.outbox._queues[channel].unacked_bytes for channel in CHANNELS}
        message = self.outbox.next_sendable(busy)
        if message is not None:
            assert before[message.channel] == 0 or (
                self.outbox._queues[message.channel].unacked_bytes <= self.window_bytes
            )
            self.lanes[message.channel] = [b"".join(map(bytes, frame)) for frame in message.frames(CHUNK_BYTES)]

    def write_frame(self) -> None:
        if self.lanes:
            channel = min(self.lanes)
            frame = self.lanes[channel].pop(0)
            self.written_bytes += len(frame)
            self.pipe += frame
            if not self.lanes[channel]:
                del self.lanes[channel]

    def deliver(self, num_bytes: int) -> None:
        data = bytes(self.pipe[:num_bytes])
        del self.pipe[:num_bytes]
        self.accept(self.decoder, data)

    def accept(self, decoder: Decoder, data: bytes) -> None:
        for arrived in decoder.receive(data):
            if self.inbox.accept(arrived):
                self.delivered[arrived.channel].append(bytes(arrived.payload))
                self.held.append((arrived.channel, arrived.sequence))
        assert decoder.error is None

    def consume(self) -> None:
        if self.held:
            ack = self.inbox.consumed(*self.held.pop(self.random.randrange(len(self.held))))
            self.acks += [ack] if ack else []

    def idle(self) -> None:
        self.acks += self.inbox.due_acks()

    def return_ack(self) -> None:
        if self.acks:
            ack = self.acks.pop(0)
            self.outbox.acked(ack.channel, ack.sequence)

    def cut(self, num_bytes: int) -> None:
        """Break the connection; so many bytes under way still arrive, some after the peer told what it received."""
        early, late = self.pipe[:num_bytes], self.pipe[num_bytes : 2 * num_bytes]
        old = self.decoder
        self.accept(old, bytes(early))
        received = self.inbox.received()
        self.accept(old, bytes(late))
        self.acks = self.acks[: self.random.randrange(len(self.acks) + 1)]
        while self.acks:
            self.return_ack()
        begun = {c: one for c, one in old.let_go().items() if one.header.sequence == received.get(c, 0) + 1}
        self.outbox.resume(received, {c: one.received_bytes for c, one in begun.items()} if self.goes_on else {})
        self.connect(begun)
        self.acks = self.inbox.resume()

    def settle(self) -> None:
        """Let everything run without further breaks until nothing moves."""
        for _ in range(10_000):
            if not (self.outbox.backlog_bytes() or self.outbox.unacked_bytes):
                return
            self.take()
            while self.lanes:
                self.write_frame()
            self.deliver(len(self.pipe))
            while self.held:
                self.consume()
            self.idle()
            while self.acks:
                self.return_ack()
        raise AssertionError("the session came to a standstill")


OPERATIONS = st.one_of(
    st.tuples(st.just("enqueue"), st.integers(0, 400)),
    st.tuples(st.sampled_from(["take", "write_frame", "consume", "idle", "return_ack"])),
    st.tuples(st.sampled_from(["deliver", "cut"]), st.integers(0, 300)),
)


@examples(200)
@given(
    st.sampled_from([1, 300, 1000, 1 << 20]), st.integers(0, 1 << 30), st.booleans(), st.lists(OPERATIONS, max_size=80)
)
def test_each_message_arrives_once_and_in_order(window_bytes, seed, goes_on, operations):
    with small_buffers():
        world = World(window_bytes, seed)
        world.goes_on = goes_on
        for name, *arguments in operations:
            getattr(world, name)(*arguments)
        world.settle()
    assert world.delivered == world.expected
    assert world.outbox.unacked_bytes == world.outbox.backlog_bytes() == 0


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_cut_at_every_byte(goes_on):
    for cut_at in range(0, 700, 3):
        world = World(1 << 20, seed=cut_at)
        world.goes_on = goes_on
        for size in (0, 100, 30, 200):
            world.enqueue(size)
        for _ in range(8):
            world.take()
        while world.lanes:
            world.write_frame()
        world.deliver(cut_at)
        world.cut(0)
        world.settle()
        assert world.delivered == world.expected


def test_a_message_comes_over_connections_that_each_pass_a_part_of_it():
    world = World(1 << 20, seed=1)
    world.enqueue(10_000)
    passes = 0
    while passes < 250:  # 100 bytes each, the header of a frame and, once, the record included
        passes += 1
        world.take()
        while world.lanes:
            world.write_frame()
        if sum(map(len, world.delivered[next(iter(world.expected))])) == 10_000:
            break
        world.cut(100)  # header and record take most of it
    assert world.delivered == world.expected
    assert passes < 250
