"""The specification tells what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import guava_nb.protocol
from guava_nb.protocol.messages import CONTROL_CHANNELS, MESSAGE_KINDS, Channel

TEXT = (Path(guava_nb.protocol.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_message_table_is_whole():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| .+\. \|$", TEXT, re.MULTILINE)
    assert {int(kind): name for kind, name in rows} == {kind: r.__name__ for kind, r in MESSAGE_KINDS.items()}


def test_the_channel_table_is_whole():
    rows = re.findall(r"\| (\d) ([A-Z]+) \| (control|bulk)", TEXT)
    assert rows == [
        (str(int(channel)), channel.name, "control" if channel in CONTROL_CHANNELS else "bulk")
        for pair in zip(range(4), range(4, 8), strict=True)
        for channel in map(Channel, pair)
    ]
