"""Whatever happens to a join code between two notebooks is found, or does no harm."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import JoinCodeError
from guava_nb.protocol.joincode import JoinCode
from tests.unit.protocol.wire_cases import examples

hosts = st.from_regex(r"[a-z0-9.:-]{1,60}", fullmatch=True)
codes = st.one_of(
    st.builds(
        JoinCode, hosts, st.integers(1, 65535), st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)
    ),
    st.builds(
        JoinCode,
        hosts,
        st.integers(1, 65535),
        st.just(b""),
        st.binary(min_size=16, max_size=16),
        st.sampled_from(["tcp", "ws"]),
    ),
)
noise = st.text(st.sampled_from(" \t\r\n\u200b\u200d\ufeff\u00a0\"'`>$.\u2028"), max_size=3)


@examples(80)
@given(codes)
def test_any_code_comes_back(code):
    assert JoinCode.decode(code.encode()) == code


@examples(80)
@given(st.data(), codes)
def test_noise_anywhere_after_the_prefix_is_harmless(data, code):
    line = code.encode()
    text = data.draw(noise) + line[:7]
    for start in range(7, len(line), 9):
        text += data.draw(noise) + line[start : start + 9]
    assert JoinCode.decode(text + data.draw(noise)) == code


@examples(200)
@given(st.data(), codes)
def test_any_mutilation_is_found_or_harmless(data, code):
    line = code.encode()
    at = data.draw(st.integers(0, len(line) - 1))
    end = min(len(line), at + data.draw(st.integers(0, 6)))
    replacement = data.draw(st.text(max_size=6) | st.text("ABCDEFabcdef0123-_", max_size=6))
    with contextlib.suppress(JoinCodeError):
        assert JoinCode.decode(line[:at] + replacement + line[end:]) == code


@examples(80)
@given(st.text(max_size=120), st.booleans())
def test_any_text_gives_a_code_or_its_error(text, with_prefix):
    with contextlib.suppress(JoinCodeError):
        JoinCode.decode("guava1:" + text if with_prefix else text)


@examples(200)
@given(st.data(), codes)
def test_swapped_neighbours_and_case_are_found(data, code):
    line = code.encode()
    at = data.draw(st.integers(7, len(line) - 2))
    swapped = line[:at] + line[at + 1] + line[at] + line[at + 2 :]
    shouted = line[:at] + line[at].swapcase() + line[at + 1 :]
    for text in (swapped, shouted):
        with contextlib.suppress(JoinCodeError):
            assert JoinCode.decode(text) == code
