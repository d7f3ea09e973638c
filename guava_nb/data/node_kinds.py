"""The numbers of a packed structure; they are the wire format: never reuse one.

A structure is msgpack. None, bool, float, int of 64 bits, str and short bytes stand for themselves; everything else is
an array whose first element is a tag of this module, followed by what the comment beside the tag says ("node" is again
one of these). An "index" counts the tensors of the `Tree`.
"""

from __future__ import annotations

TENSOR = 0  # index
LIST = 1  # node...
TUPLE = 2  # node...
DICT = 3  # key node, value node, ...
ORDERED_DICT = 4  # the same
SET = 5  # node...
FROZENSET = 6  # node...
BIG_INT = 7  # two's complement, little endian
COMPLEX = 8  # real, imaginary
SLICE = 9  # start node, stop node, step node
SIZE = 10  # torch.Size: int...
DTYPE = 11  # torch.dtype: name without "torch."
DEVICE = 12  # torch.device: text
ARRAY = 13  # numpy array: index of its bytes, dtype text, shape
OBJECT_ARRAY = 14  # numpy array of objects: shape, node...
SCALAR = 15  # numpy scalar: dtype text, bytes
NAMEDTUPLE = 16  # class name, field names, node...
DATACLASS = 17  # class name, field names, node...
LONG_BYTES = 18  # index of a uint8 tensor
BYTEARRAY = 19  # index of a uint8 tensor
ODD_STRING = 20  # text with lone surrogates, as UTF-8 that allows them
FAR_STRUCTURE = 21  # only at the root: index of a uint8 tensor that holds the real structure
PERMUTED_TENSOR = 22  # index, axes from the outermost in memory to the innermost: the tensor's bytes lie in that order

#: Tensors begin at multiples of this, so that a received tensor needs no copy.
ALIGNMENT_BYTES = 16
#: Bytes longer than this lie in the payload, where they are not copied.
INLINE_BYTES = 4096
#: A structure longer than this lies in the payload: records are limited to a few MiB, payloads are not.
INLINE_STRUCTURE_BYTES = 256 << 10
#: A structure is decoded into Python objects of many times its size; beyond this the sender is told to use tensors.
MAX_STRUCTURE_BYTES = 64 << 20
