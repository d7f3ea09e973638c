"""One chunk of a payload made smaller and back, with zstd. Lossless; nothing is allocated that was not bounded before.

A compressed chunk is one zstd frame that states the size of its content. Knows bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence

from guava_nb.errors import RemoteProtocolError

try:
    import zstandard
except ImportError:  # the link works without it: this side then offers no compression
    zstandard = None  # type: ignore[assignment]

__all__ = ["CODECS", "compress", "decompress_into"]

#: What this side can read and write, by the names in `Attach` and `Attached`.
CODECS: tuple[str, ...] = () if zstandard is None else ("zstd",)

_LEVEL = 1  # the quickest of the regular levels; higher ones win a few percent and cost several times as much
_MAX_WINDOW_BYTES = 1 << 20  # a chunk has at most 1 MiB, so an honest frame never asks for more memory than that


def compress(pieces: Sequence[memoryview | bytes]) -> bytes:
    """Return the concatenation of some buffers as one zstd frame."""
    whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(whole)


def decompress_into(packed: memoryview, target: memoryview) -> int:
    """Write the content of a zstd frame to the start of `target`; returns how many bytes it has.

    The size that the frame states is judged before anything is decompressed, and no more than that is.

    Raises:
        RemoteProtocolError: it is no such frame, states no size or one beyond `target`, or holds something else.
    """
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 < size <= target.nbytes:
            stated = f"states {size} bytes" if size >= 0 else "does not state its size"
            raise RemoteProtocolError(
                f"the peer sent a compressed chunk that {stated}, where 1 to {target.nbytes} may come"
            )
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        content = reader.decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"the peer sent a compressed chunk that cannot be read: {error}") from error
    if len(content) != size:
        raise RemoteProtocolError(f"the peer sent a compressed chunk of {len(content)} bytes that states {size}")
    target[:size] = content
    return int(size)
