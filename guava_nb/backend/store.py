"""torch's key-value store over the relay: where a TCPStore is out of reach, its keys travel with everything else.

Keep a reference to a store as long as torch uses it: when the Python object is gone, torch finds none of its methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from guava_nb.backend.endpoint import Endpoint

__all__ = ["GuavaStore", "store_for"]


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class GuavaStore(Store):
    """Keys at the hub, all under one prefix.

    Args:
        endpoint: the way there.
        prefix: stands before every key; `Relay.forget` drops all keys of a prefix.
    """

    def __init__(self, endpoint: Endpoint, prefix: str) -> None:
        super().__init__()
        self.endpoint, self.prefix = endpoint, prefix
        self._clones: list[GuavaStore] = []  # torch (NCCL, say) holds only their C++ half

    def clone(self) -> GuavaStore:
        """The same keys by another object, which lives as long as this one."""
        made = GuavaStore(self.endpoint, self.prefix)
        self._clones.append(made)
        return made

    def _keys(self, *keys: str) -> list[str]:
        return [self.prefix + key for key in keys]

    def _timeout_s(self, timeout: timedelta | None = None) -> float:
        return (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.endpoint.ask("set", self._keys(key), [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a key and give its value."""
        return self.endpoint.ask("get", self._keys(key), timeout_s=self._timeout_s()).values[0]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0, and give the sum."""
        return self.endpoint.ask("add", self._keys(key), number=value).number

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set a key if it has the expected value; gives the value that holds then."""
        values = [_bytes(expected), _bytes(wanted)]
        return self.endpoint.ask("compare_set", self._keys(key), values).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self.endpoint.ask("check", self._keys(*keys)).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            CollectiveTimeout: they were not in time; it names them.
        """
        self.endpoint.ask("wait", self._keys(*keys), timeout_s=self._timeout_s(timeout))

    def delete_key(self, key: str) -> bool:
        """Delete a key; gives whether it was there."""
        return bool(self.endpoint.ask("delete", self._keys(key)).number)

    def num_keys(self) -> int:
        """Number of keys under this prefix."""
        return self.endpoint.ask("num_keys", [self.prefix]).number

    def list_keys(self) -> list[str]:
        """Names of the keys under this prefix."""
        return [name.decode()[len(self.prefix) :] for name in self.endpoint.ask("list_keys", [self.prefix]).values]

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set work: they do."""
        return True

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes at the end of a value."""
        self.endpoint.ask("append", self._keys(key), [_bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and give their values."""
        return list(self.endpoint.ask("multi_get", self._keys(*keys), timeout_s=self._timeout_s()).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self.endpoint.ask("multi_set", self._keys(*keys), [_bytes(value) for value in values])

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self.endpoint.ask("queue_push", self._keys(key), [_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one if wanted."""
        reply = self.endpoint.ask("queue_pop", self._keys(key), number=int(block), timeout_s=self._timeout_s())
        return reply.values[0]

    def queue_len(self, key: str) -> int:
        """Number of values in a queue."""
        return self.endpoint.ask("queue_len", self._keys(key)).number

    # torch's C++ side asks for these by their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    compareSet = compare_set  # noqa: N815
    multiGet = multi_get  # noqa: N815
    multiSet = multi_set  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815
    queuePush, queuePop, queueLen = queue_push, queue_pop, queue_len  # noqa: N815


def store_for(endpoint: Endpoint, prefix: str) -> Store:
    """A store whose keys live at the hub under `prefix`; also good for a rendezvous of gloo or nccl."""
    return GuavaStore(endpoint, prefix)
