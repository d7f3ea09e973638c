"""Workers in containers, with a stand-in for docker that notes its line."""

from __future__ import annotations

import pytest

from guava_nb.config.version import installed_version
from guava_nb.errors import ConfigError
from guava_nb.launchers import docker
from guava_nb.launchers.docker import DockerLauncher
from guava_nb.launchers.launcher import Order
from guava_nb.protocol.joincode import JoinCode
from tests.support.processes import eventually
from tests.support.stand_ins import StandIns

FACTS = f'guava-facts ["/usr/bin/python", "3.11", "{installed_version()}", "2.13", 0, ""]\n'
#: As docker does: reads its standard input to the end, or until it is told to leave, and passes on what it read.
RUNS = '#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/docker.lines\ncase "$1" in\nrun) case "$*" in *"worker --join-file"*) ' \
    'while read -r line; do echo "$line" >> {folder}/docker.said; [ "$line" = leave ] && exit 0; done;; ' \
    "*) printf %s '{facts}';; esac;;\nps) echo left-over;;\nesac\n"  # fmt: skip


@pytest.fixture
def daemon(programs: StandIns, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.setattr(docker, "LEAVE_S", 5.0)
    monkeypatch.setattr(docker.sys, "platform", "linux")
    script = programs.folder / "docker"
    script.write_text(RUNS.format(folder=programs.folder, facts=FACTS))
    script.chmod(0o755)
    return programs


def said(programs: StandIns) -> list[str]:
    path = programs.folder / "docker.said"
    return path.read_text().splitlines() if path.exists() else []


def test_the_code_goes_by_standard_input_and_the_end_removes_what_carries_the_mark(
    daemon: StandIns, order: Order
) -> None:
    launcher = DockerLauncher("2,gpus=2,image=img")
    launcher.check()
    launcher.start(order)
    new = JoinCode.new("192.0.2.8", 4712)
    launcher.follow(new)
    eventually(lambda: len(said(daemon)) == 4, 20, "both containers heard both codes")
    assert sorted(said(daemon)) == sorted([order.code.encode(), new.encode()] * 2)
    runs = sorted(line for line in daemon.lines("docker") if "--join-file" in line)
    # An image may start something by itself, as our own starts `guava worker`: neither call may become words of that.
    assert '--gpus "device=0,1" --entrypoint python img -m guava_nb worker --join-file - --mark' in runs[0]
    assert "--entrypoint python img -c" in next(line for line in daemon.lines("docker") if "--rm --label" in line)
    assert '"device=2,3"' in runs[1] and all("--network" not in line and "--init" in line for line in runs)
    assert launcher.count == 4 and launcher.failure() == "" and launcher.look() == ""
    assert launcher.end() == "" and said(daemon).count("leave") == 2
    assert daemon.lines("docker")[-2:] == [
        f"ps --all --quiet --filter label=guava-nb.start={launcher.mark}",
        "rm --force left-over",
    ]
    assert not any("guava1:" in line for line in daemon.lines("docker"))


def test_a_session_on_the_loopback_is_reached_by_sharing_its_network(daemon: StandIns, order: Order) -> None:
    near = Order(JoinCode.new("127.0.0.1", 4711), False, 4711, order.folder)
    launcher = DockerLauncher("1")
    launcher.start(near)
    eventually(lambda: said(daemon), 20, "it heard the code")
    assert "--network host" in daemon.lines("docker")[-1] and said(daemon) == [near.code.encode()]
    launcher.end()


def test_docker_desktop_has_a_name_for_this_machine(
    daemon: StandIns, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker.sys, "platform", "darwin")
    launcher = DockerLauncher("1")
    launcher.start(Order(JoinCode.new("127.0.0.1", 4711), False, 4711, order.folder))
    eventually(lambda: said(daemon), 20, "it heard the code")
    assert JoinCode.decode(said(daemon)[0]).address == "host.docker.internal:4711"
    launcher.end()


def test_a_container_that_ended_is_told_with_its_last_line(programs: StandIns, order: Order) -> None:
    programs.put("docker")
    (programs.folder / "docker").write_text("#!/bin/sh\necho no space left on device\nexit 125\n")
    launcher = DockerLauncher("1")
    launcher.start(order)
    eventually(launcher.failure, 20, "it has ended")
    assert "status 125: no space left on device" in launcher.look() and launcher.look() == ""
    assert "could not be removed" in launcher.end()


#: What Docker 28 says where there is no such image: its own words, and at the end where to read about `run`.
PULL_DENIED = (
    "Unable to find image 'img:latest' locally\ndocker: Error response from daemon: pull access denied for img, repository "
    "does not exist or may require 'docker login'\n\nRun 'docker run --help' for more information"
)


@pytest.mark.parametrize(
    ("version", "run", "sentence"),
    [
        ((1, "", "Cannot connect to the Docker daemon"), (0, FACTS, ""), "does not answer: Cannot connect"),
        ((0, "28", ""), (125, "", PULL_DENIED), "does not run python: docker: .*pull access denied.*build it"),
        ((0, "28", ""), (0, FACTS.replace(installed_version(), "0.0.1"), ""), "has guava_nb 0.0.1"),
    ],
)
def test_what_is_missing_is_told_first(
    programs: StandIns, version: tuple[int, str, str], run: tuple[int, str, str], sentence: str
) -> None:
    for when, (status, says, complains) in (("version", version), ("run", run)):
        programs.put("docker", says, status, when, complains)
    with pytest.raises(ConfigError, match=sentence):
        DockerLauncher("1").check()
