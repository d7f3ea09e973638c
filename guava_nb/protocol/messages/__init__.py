"""What can be said: every message as a typed record, and its number.

Knows the records; knows nothing of framing, sockets or tensors' libraries. A record travels as msgpack (one array per
record, fields in order). Tensor bytes never stand inside a record: they follow it as the frame's payload, described by
`TensorSpec` in the record's `Tree` or `FlatTensor`.

Import every name from here. The README's table shows all numbers together.
"""
# ruff: noqa: F403

from guava_nb.protocol.messages.code_records import *
from guava_nb.protocol.messages.collective_records import *
from guava_nb.protocol.messages.connection_records import *
from guava_nb.protocol.messages.group_records import *
from guava_nb.protocol.messages.kinds import *
from guava_nb.protocol.messages.measure_records import *
from guava_nb.protocol.messages.pass_records import *
from guava_nb.protocol.messages.report_records import *
from guava_nb.protocol.messages.row_records import *
from guava_nb.protocol.messages.run_records import *
from guava_nb.protocol.messages.step_records import *
from guava_nb.protocol.messages.wire_types import *
