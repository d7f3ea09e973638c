"""What reaches a shell is quoted, so that no name in a text or a file becomes a command."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from guava_nb.errors import ConfigError
from guava_nb.launchers import ssh
from guava_nb.launchers.docker import DockerLauncher
from guava_nb.launchers.k8s import KubernetesLauncher
from guava_nb.launchers.launcher import Order, is_mark
from guava_nb.launchers.ssh import SshLauncher

HOSTILE = 'guava-1\' "$(touch touched)" `touch touched`; touch touched; /{system("touch touched")}/ \''


def test_a_start_marks_itself_with_what_is_taken_for_a_mark() -> None:
    assert is_mark(DockerLauncher("1").mark)
    assert not any(map(is_mark, ("", "guava-", "guava-123456789", "guava-0123456789a", "Guava-0123456789", HOSTILE)))


@pytest.mark.skipif(os.name != "posix", reason="needs a shell and awk")
@pytest.mark.parametrize("mark", ["guava-0123456789", HOSTILE])
def test_the_script_that_ends_workers_runs_nothing_but_itself(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[str] = []

    def noted(words: list[str], script: str, limit_s: float) -> CompletedProcess[str]:
        scripts.append(script)
        return CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(ssh, "run_program", noted)
    monkeypatch.setattr(ssh, "find_program", lambda name, way: name)
    launcher = SshLauncher("host")
    launcher.mark = mark
    assert launcher.end() == ""
    done = subprocess.run(["sh", "-s"], input=scripts[0], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert not list(tmp_path.iterdir())
    if is_mark(mark):
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="needs a shell and awk")
def test_the_script_finds_the_workers_of_its_mark_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts: list[str] = []
    monkeypatch.setattr(
        ssh, "run_program", lambda words, text, s: scripts.append(text) or CompletedProcess(words, 0, "", "")
    )
    monkeypatch.setattr(ssh, "find_program", lambda name, way: name)
    launcher = SshLauncher("host")
    launcher.end()
    lines = [
        f" 11 /usr/bin/python -m guava_nb worker --join-file - --mark {launcher.mark} --gpus auto",
        f" 12 python -m guava_nb worker --mark {launcher.mark}",
        f" 13 python -m guava_nb worker --mark {launcher.mark}0",
        " 14 python -m guava_nb worker --mark guava-0123456789",
        f" 15 vim {launcher.mark}",
    ]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    look = scripts[0].partition("| ")[2].partition("); [")[0]
    done = subprocess.run(["sh", "-c", f"{look} <lines"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.split() == ["11", "12"]


@pytest.mark.parametrize(
    "host", ["-oProxyCommand", "a b", "a;id", "$(id)", "a`id`", "a|b", "a'b", 'a"b', "a\x1bb", "a&b", "~>b"]
)
def test_a_host_that_a_shell_would_read_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is no host"):
        SshLauncher(host)
    SshLauncher("me@gpu-1.example,[fe80::1%eth0],ssh://me@gpu2:22,lab_3")


def test_an_image_that_docker_would_take_for_an_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no image"):
        DockerLauncher("1,image=--privileged")


def test_the_commands_that_a_person_pastes_are_quoted(order: Order, tmp_path: Path) -> None:
    launcher = KubernetesLauncher("1,apply=no,context=a;id,namespace=b c")
    folder = tmp_path / "my state; id"
    said = launcher.start(Order(order.code, True, 1, folder))
    line = next(line for line in said.splitlines() if "create secret" in line)
    words = shlex.split(line)
    assert words[:3] == ["kubectl", "--context=a;id", "--namespace=b c"]
    assert words[-1] == f"--from-file=join-code={folder / launcher.mark}.code"
    applied = next(line for line in said.splitlines() if " create -f " in line)
    assert shlex.split(applied)[-1] == str(folder / f"{launcher.mark}.yaml")
