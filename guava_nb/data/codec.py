"""Any nesting of plain values and tensors as one `Tree` record plus raw bytes, and back.

Knows Python's plain types, numpy arrays and torch tensors; knows nothing of the wire, workers or batches. Never pickles
and never runs code of the peer: a class travels as its name, and the receiver decides whether to look it up.
`guava_nb.data.node_kinds` says what a structure looks like.
"""

from __future__ import annotations

from guava_nb.data.classes import Resolve, class_resolver, imported_class
from guava_nb.data.packing import pack
from guava_nb.data.tensors import DTYPES, dtype_name, tensor_bytes, tensor_from
from guava_nb.data.unpacking import unpack

__all__ = [
    "DTYPES",
    "Resolve",
    "class_resolver",
    "dtype_name",
    "imported_class",
    "pack",
    "tensor_bytes",
    "tensor_from",
    "unpack",
]
