"""From nothing to a worker: the wheel through every way that a worker goes; README's blocks in real kernels, one of them bare."""

from __future__ import annotations

import importlib.util
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.install.bootstrap import NotBrought, bring, fetch
from guava_nb.install.cell import WORKER_NEEDS, wheel_request
from guava_nb.protocol.handshake_proof import PREAMBLE
from guava_nb.protocol.joincode import JoinCode
from guava_nb.tunnels.registry import make_tunnel
from tests.support.bare_venv import bare_venv, closure, repack
from tests.support.cloudflared import FakeCloudflared, stand_in
from tests.support.kernels import Kernel
from tests.support.links import World, nothing_left_behind, own_port, world
from tests.support.processes import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in for cloudflared is told things by POSIX signals")

WHEEL = bytes(range(256)) * 5000


def fetched(code: JoinCode, size: int = len(WHEEL)) -> bytes:
    return fetch(code.encode(), size, PREAMBLE, wheel_request())


def code_of(made: World, scheme: str) -> JoinCode:
    return made.listener.join_code().with_address("127.0.0.1", made.listener.port, scheme)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudflared]:
    with stand_in(tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.parametrize(("tls", "scheme"), [(True, "tls"), (True, "ws"), (False, "tcp"), (False, "ws")])
def test_the_wheel_passes_where_a_worker_passes(tls: bool, scheme: str) -> None:
    with nothing_left_behind(), world(tls=tls) as made:
        made.listener.wheels.offer(WHEEL)
        assert fetched(code_of(made, scheme)) == WHEEL


def test_the_wheel_passes_through_an_https_gateway(fake: FakeCloudflared) -> None:
    with world() as made:
        made.listener.wheels.offer(WHEEL)
        tunnel = make_tunnel(f"cloudflared:{fake.program}")
        at = tunnel.start(made.listener.port)
        try:
            code = made.listener.join_code().with_address(at.host, at.port, at.scheme)
            assert fetched(code) == WHEEL
            made.close()
            with pytest.raises(
                NotBrought, match="answered .*502.*: the tunnel stands, and no session is behind it now"
            ):
                fetched(code)
        finally:
            tunnel.stop()


def test_who_does_not_prove_the_code_gets_nothing_and_a_sentence() -> None:
    with nothing_left_behind(), world() as made:
        made.listener.wheels.offer(WHEEL)
        right = code_of(made, "tls")
        other_secret = JoinCode.new(right.host, right.port, right.fingerprint, b"another secret..")
        with pytest.raises(NotBrought, match="does not know this cell's join code: run %guava_up again"):
            fetched(other_secret)
        with pytest.raises(NotBrought, match="another certificate than this cell's answers"):
            fetched(JoinCode.new(right.host, right.port, b"another print...", right.secret))
        assert made.listener.stats.refused["wrong code"] == 1
        assert fetched(right) == WHEEL, "the others did no harm"


def test_a_closed_session_and_a_stranger_are_told() -> None:
    def told(code: JoinCode) -> str:
        with pytest.raises(NotBrought) as caught:
            bring(code.encode(), "guava_nb-0.0.0-py3-none-any.whl", 9, "ab", [], PREAMBLE, wheel_request())
        return str(caught.value)

    closed = JoinCode.new("127.0.0.1", own_port(), b"f" * 16)
    assert re.search(
        r"the session is not reached \(.*refused\): it was closed, or its tunnel was; run %guava_up", told(closed)
    )
    with world() as made:  # nothing is offered there
        assert "bytes came, and they are not what this cell expects; run %guava_up again" in told(code_of(made, "tls"))


# ---------------------------------------------------------------------------------------------------------- README's pair


def block(name: str) -> str:
    """The fenced block of README.md after the marker of this name."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", text, re.S)
    assert found, f"README.md has no block after <!-- {name} -->"
    return found[1]


def shown_cell(text: str) -> str:
    """The cell to paste, out of what %guava_up wrote."""
    found = re.search(r"^( {4}# Brings guava_nb.*?^ {4}%guava_worker guava1:\S+)$", text, re.S | re.M)
    assert found, text
    return textwrap.dedent(found[1])


@pytest.fixture
def laptop(fake: FakeCloudflared) -> Iterator[Kernel]:
    path = f"{fake.folder}{os.pathsep}{os.environ['PATH']}"
    kernel = Kernel(**fake.environment, PATH=path)
    yield kernel
    kernel.close()


@pytest.fixture
def bare(fake: FakeCloudflared, tmp_path: Path) -> Iterator[Kernel]:
    """A kernel as Colab gives one, as far as it matters: torch, numpy and Jupyter, no guava_nb, and no package index."""
    has = closure("torch", "numpy", "ipykernel", "pip")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in closure(*WORKER_NEEDS) - has:
        repack(name, wheels)
    python = bare_venv(tmp_path / "bare", has)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    kernel = Kernel(python=str(python), folder=tmp_path, **fake.environment, **pip, PYTHONPATH="")
    yield kernel
    kernel.close()


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
@pytest.mark.timeout(600)
def test_readmes_blocks_train_with_a_bare_notebook_that_runs_the_shown_cell(laptop: Kernel, bare: Kernel) -> None:
    assert "False" in bare.run("import importlib.util; print(importlib.util.find_spec('guava_nb') is not None)")
    training = laptop.start(block("orchestrator"), 400)
    laptop.wait_for(r"Waiting up to .* for workers: 0 of 1", 200)
    cell = shown_cell(laptop.text)
    before = bare.run("import torch, numpy; print(torch.__version__, numpy.__version__)")
    working = bare.start(cell, 400)
    status, text = training()
    assert status == "ok" and "accuracy" in text and "done" in text, text + bare.text
    assert "Fetching guava_nb" in bare.text and "Installed msgspec" in bare.text
    laptop.run(block("model"), 60)
    assert "done" in laptop.run(block("train"), 300)
    assert float(laptop.run("print(run.validations[-1]['accuracy'])")) > 0.8
    laptop.run("%guava_down")
    assert working()[0] == "ok"
    assert before == bare.run("import torch, numpy; print(torch.__version__, numpy.__version__)")

    # Again, with what README says for a notebook that has guava_nb: the code is typed. The shown cell would fetch nothing now.
    training = laptop.start(block("orchestrator"), 400)
    laptop.wait_for(r"Waiting up to .* for workers: 0 of 1", 200)
    again = shown_cell(laptop.text)
    assert "Fetching" not in bare.run(again.rpartition("\n%load_ext")[0])
    code = again.rpartition(" ")[2]
    working = bare.start(block("worker"), 400, typed=code)
    status, text = training()
    assert status == "ok" and "done" in text, text + bare.text
    laptop.run("%guava_down")
    assert working()[0] == "ok"
