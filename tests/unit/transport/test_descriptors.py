"""A process that serves many workers gets the descriptors that the system allows, and says what to do where it has none left."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from guava_nb.transport.descriptors import advice_if_full

resource = pytest.importorskip("resource")

#: In a process of its own: the limits of this one stay as they are.
_SCRIPT = """
import resource
from guava_nb.transport.descriptors import make_room

def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
make_room(31)
few = soft()
make_room(32)
more = soft()
make_room(200)
most = soft()
make_room(299)
print(few, more, most, soft())
"""


def test_the_limit_is_raised_where_half_is_used_and_never_above_what_the_system_allows():
    told = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["64", "256", "300", "300"]


def test_a_lack_of_descriptors_is_told_with_the_number_and_the_way_out():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    told = advice_if_full(OSError(errno.EMFILE, "Too many open files"))
    assert str(soft) in told and "ulimit -n" in told
    assert advice_if_full(OSError(errno.EINVAL, "no")) == ""
