"""The beginning of every connection: reach, prove, attach, each within one deadline.

Knows the order of the first bytes; knows nothing of sessions. Whatever goes wrong is an error with a sentence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from guava_nb.errors import ConfigError, GuavaError, JoinRefused, LinkBroken, LinkTimeout, RemoteProtocolError
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.framing import Arrived, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach, Attached, Channel, Message, Refused
from guava_nb.protocol.proof import DiallerProof, ListenerProof
from guava_nb.protocol.state import Event, Role, State, advance, received, sent
from guava_nb.transport.stream import Stream
from guava_nb.transport.tcp import connect
from guava_nb.transport.tls import TlsStream

__all__ = ["Attachment", "Deadline", "attach", "prove", "receive_record", "send_record"]


class Deadline:
    """One deadline for a row of waits.

    Args:
        seconds: from now.
        what: what must be done by then, for the error: "prove itself".
        peer: who must do it.
    """

    def __init__(self, seconds: float, what: str, peer: str) -> None:
        self._until = time.monotonic() + seconds
        self._sentence = f"{peer} did not {what} within {seconds:g} s"

    def left_s(self) -> float:
        """Seconds left.

        Raises:
            LinkTimeout: none.
        """
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise LinkTimeout(self._sentence)
        return left_s

    def receive(self, stream: Stream, view: memoryview) -> int:
        """Receive at least one byte before the deadline.

        Raises:
            LinkTimeout: nothing came.
            LinkBroken: the peer left.
        """
        stream.set_deadline(self.left_s())
        try:
            count = stream.recv_into(view)
        except LinkTimeout:
            raise LinkTimeout(self._sentence) from None
        if not count:
            raise LinkBroken(f"{stream.peer} closed the connection before it stood")
        return count


@dataclass
class Attachment:
    """A connection that stands: what the dialler got for its `Attach`."""

    stream: Stream
    decoder: Decoder
    attached: Attached
    early: list[Arrived]  # messages that came in the same read


def prove(stream: Stream, proof: DiallerProof | ListenerProof, deadline: Deadline) -> None:
    """Run one side of the mutual proof.

    Raises:
        AuthenticationError: the secrets differ.
        VersionMismatch: another version of the proof.
        RemoteProtocolError: the peer is something else.
        LinkTimeout: the peer is too slow.
        LinkBroken: the peer left.
    """
    while True:
        outgoing = proof.to_send()
        if outgoing:
            stream.send_all((outgoing,))
        if proof.error is not None:
            raise proof.error
        if not proof.bytes_wanted:
            return
        view = memoryview(bytearray(proof.bytes_wanted))
        proof.receive(bytes(view[: deadline.receive(stream, view)]))


def send_record(stream: Stream, record: Message) -> None:
    """Send one record that belongs to the connection itself."""
    for frame in OutgoingMessage(record, Channel.CONTROL, 0).frames():
        stream.send_all(frame)


def receive_record(stream: Stream, decoder: Decoder, deadline: Deadline) -> tuple[Arrived, list[Arrived]]:
    """Wait for the next message.

    Returns:
        The message, and those that came whole in the same read.

    Raises:
        RemoteProtocolError: what came is no message.
        LinkTimeout: the peer is too slow.
        LinkBroken: the peer left.
    """
    while True:
        arrived = decoder.buffer_updated(deadline.receive(stream, decoder.get_buffer()))
        if arrived:
            return arrived[0], arrived[1:]
        if decoder.error is not None:
            raise decoder.error


def attach(code: JoinCode, record: Attach, options: LinkOptions, timeout_s: float) -> Attachment:
    """Open one connection to a listener, from the socket to `Attached`.

    Raises:
        AuthenticationError: secret or fingerprint do not match.
        JoinRefused: the listener said no.
        VersionMismatch: it speaks another version.
        RemoteProtocolError: it is no listener of ours.
        LinkTimeout: it is too slow or not there.
        LinkBroken: it cannot be reached, or left.
    """
    deadline = Deadline(timeout_s, "let us in", code.address)
    stream = _reach(code, options, deadline)
    try:
        prove(stream, DiallerProof(code.secret, code.fingerprint), deadline)
        state = advance(State.PROVING, Role.DIALLER, Event.PROVED)
        send_record(stream, record)
        state = advance(state, Role.DIALLER, sent(Attach))
        decoder = Decoder(Limits(max_payload_bytes=options.max_payload_bytes, compressed=bool(record.codecs)))
        answer, early = receive_record(stream, decoder, deadline)
        advance(state, Role.DIALLER, received(type(answer.message)))
        if isinstance(answer.message, Refused):
            raise _refusal(answer.message)
        if not isinstance(answer.message, Attached):
            raise RemoteProtocolError(f"{code.address} answered Attach with {type(answer.message).__name__}")
    except BaseException:
        stream.close()
        raise
    return Attachment(stream, decoder, answer.message, early)


def _reach(code: JoinCode, options: LinkOptions, deadline: Deadline) -> Stream:
    if code.scheme not in ("tcp", "tls"):
        raise ConfigError(f"the join code asks for {code.scheme}, which this version cannot dial")
    stream = connect(code.host, code.port, deadline.left_s(), options.socket)
    if code.scheme == "tcp":
        return stream
    try:
        return TlsStream.over_client(stream, code.fingerprint, deadline.left_s())
    except BaseException:
        stream.close()
        raise


def _refusal(refused: Refused) -> GuavaError:
    return JoinRefused(f"{refused.reason}; {refused.next_step}" if refused.next_step else refused.reason)
