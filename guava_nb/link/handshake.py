"""The beginning of every connection: reach, prove, attach, each within one deadline.

Knows the order of the first bytes; knows nothing of sessions. Whatever goes wrong is an error with a sentence.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from guava_nb.errors import GuavaError, JoinRefused, LinkBroken, LinkTimeout, RemoteProtocolError
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.framing import Arrived, Decoder, Incoming, OutgoingMessage
from guava_nb.protocol.handshake_proof import DiallerProof, ListenerProof
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach, Attached, Channel, Message, Refused
from guava_nb.protocol.payload import PayloadMemory
from guava_nb.protocol.shown_text import cleaned
from guava_nb.protocol.state import Event, Role, State, advance, received, sent
from guava_nb.transport.stream import Stream
from guava_nb.transport.tcp import connect
from guava_nb.transport.tls import TlsStream
from guava_nb.transport.websocket import WebSocketStream, begins_http
from guava_nb.tunnels.ngrok_errors import sentence

__all__ = ["SHARED_MEMORY", "Attachment", "Deadline", "attach", "prove", "receive_record", "send_record", "unwrap"]

#: For payloads of all connections: with one for each, two hundred workers would pin two hundred times as much.
SHARED_MEMORY = PayloadMemory(lock=threading.Lock())
# A port that swallows what comes is told from one that answers after three tries of the system (0, 1 and 3 s): who waits for more
# waits in vain, and a wrong code is to be answered within 5 s. A user who set a longer patience has a line that needs it.
_TCP_S, _TCP_SHARE = 4.0, 0.4
_BEGINNING_BYTES = 4  # enough to tell TLS, HTTP and our own proof apart; each of them begins with more


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
            raise LinkBroken(f"{stream.peer} closed the connection during the handshake")
        return count


@dataclass
class Attachment:
    """A connection that stands: what the dialler got for its `Attach`."""

    stream: Stream
    decoder: Decoder
    attached: Attached
    early: list[Arrived]  # messages that came in the same read


def prove(stream: Stream, proof: DiallerProof | ListenerProof, deadline: Deadline, early: bytes = b"") -> None:
    """Run one side of the mutual proof; `early` was received already.

    Args:
        stream: the connection.
        proof: of this side's role.
        deadline: of the whole proof.
        early: bytes that were received already.

    Raises:
        AuthenticationError: the secrets differ.
        VersionMismatch: another version of the proof.
        RemoteProtocolError: the peer is something else.
        LinkTimeout: the peer is too slow.
        LinkBroken: the peer left.
    """
    proof.receive(early)
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

    Args:
        stream: after its proof.
        decoder: of that stream.
        deadline: of the whole beginning of a connection.

    Returns:
        The message, and those that came whole in the same read; what they say of the connection as `shown_text` gives it.

    Raises:
        RemoteProtocolError: what came is no message.
        LinkTimeout: the peer is too slow.
        LinkBroken: the peer left.
    """
    while True:
        arrived = decoder.buffer_updated(deadline.receive(stream, decoder.get_buffer()))
        if arrived:
            first, *rest = (one if one.sequence else replace(one, message=cleaned(one.message)) for one in arrived)
            return first, rest
        if decoder.error is not None:
            raise decoder.error


def attach(
    code: JoinCode,
    record: Attach,
    options: LinkOptions,
    timeout_s: float,
    begun: Mapping[int, Incoming] | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Attachment:
    """Open one connection to a listener, from the socket to `Attached`.

    Args:
        code: where the listener is.
        record: what to say.
        options: sizes.
        timeout_s: seconds for all of it.
        begun: messages of the session that came in part, by channel; the listener may go on with them at once.
        on_step: hears what begins, so that a failure can be placed: "tcp", "gateway" (the operator's TLS), "websocket",
            "tls" (ours, with the fingerprint), "secret", "attach".

    Raises:
        AuthenticationError: secret or fingerprint do not match.
        JoinRefused: the listener said no.
        VersionMismatch: it speaks another version.
        RemoteProtocolError: it is no listener of ours.
        LinkTimeout: it is too slow or not there.
        LinkBroken: it cannot be reached, or left.
    """
    deadline = Deadline(timeout_s, "finish the handshake", code.address)
    stream = _reach(code, options, deadline, on_step)
    try:
        on_step("secret")
        prove(stream, DiallerProof(code.secret, code.fingerprint), deadline)
        on_step("attach")
        return _ask(stream, code, record, options, deadline, begun or {})
    except BaseException:
        stream.close()
        raise


def try_way(code: JoinCode, options: LinkOptions, timeout_s: float) -> None:
    """Reach a listener, prove both sides to each other, and hang up; arguments and errors as for `attach`.

    Args:
        code, options: as for `attach`.
        timeout_s: for all of it.
    """
    deadline = Deadline(timeout_s, "answer", code.address)
    stream = _reach(code, options, deadline, lambda step: None)
    try:
        prove(stream, DiallerProof(code.secret, code.fingerprint), deadline)
    finally:
        stream.close()


def _ask(
    stream: Stream,
    code: JoinCode,
    record: Attach,
    options: LinkOptions,
    deadline: Deadline,
    begun: Mapping[int, Incoming],
) -> Attachment:
    state = advance(State.PROVING, Role.DIALLER, Event.PROVED)
    send_record(stream, record)
    state = advance(state, Role.DIALLER, sent(Attach))
    decoder = Decoder(options.limits(record.session_id, bool(record.codecs)), SHARED_MEMORY)
    decoder.carry(begun)
    answer, early = receive_record(stream, decoder, deadline)
    advance(state, Role.DIALLER, received(type(answer.message)))
    if isinstance(answer.message, Refused):
        raise _refusal(answer.message)
    if not isinstance(answer.message, Attached):
        raise RemoteProtocolError(f"{code.address} answered Attach with {type(answer.message).__name__}")
    return Attachment(stream, decoder, answer.message, early)


def _reach(code: JoinCode, options: LinkOptions, deadline: Deadline, on_step: Callable[[str], None]) -> Stream:
    on_step("tcp")
    patience_s = max(_TCP_S, _TCP_SHARE * options.connect_timeout_s)
    stream: Stream = connect(code.host, code.port, min(deadline.left_s(), patience_s), options.socket)
    try:
        if code.scheme == "wss":
            on_step("gateway")
            stream = TlsStream.over_gateway(stream, code.host, deadline.left_s())
        if code.scheme in ("ws", "wss"):
            on_step("websocket")
            where = (code.host, code.port, code.scheme == "wss")
            stream = WebSocketStream.over_client(stream, *where, deadline.left_s(), ngrok=sentence)
        if code.fingerprint:
            on_step("tls")
            stream = TlsStream.over_client(stream, code.fingerprint, deadline.left_s())
    except BaseException:
        stream.close()
        raise
    return stream


def unwrap(tcp: Stream, tls: ssl.SSLContext | None, deadline: Deadline) -> tuple[Stream, bytes]:
    """Look at the first bytes of a newcomer and take off the layers that it came with.

    Args:
        tcp: just accepted; closed by the caller if this raises.
        tls: what the proof must be wrapped in; None when this listener does not encrypt.
        deadline: of the newcomer.

    Returns:
        The stream on which it must prove itself, and what was received of its proof already.

    Raises:
        RemoteProtocolError: something else; a browser has been told so.
        LinkTimeout: it is too slow.
        LinkBroken: it left.
    """
    stream, early = tcp, _beginning(tcp, deadline)
    if begins_http(early):
        stream = WebSocketStream.over_server(tcp, early, deadline.left_s())
        early = _beginning(stream, deadline)
    if tls is None:
        return stream, early
    return TlsStream.over_server(stream, tls, deadline.left_s(), early), b""


def _beginning(stream: Stream, deadline: Deadline) -> bytes:
    view = memoryview(bytearray(_BEGINNING_BYTES))
    done = 0
    while done < len(view):
        done += deadline.receive(stream, view[done:])
    return bytes(view)


def _refusal(refused: Refused) -> GuavaError:
    return JoinRefused(f"{refused.reason}; {refused.next_step}" if refused.next_step else refused.reason, refused.code)
