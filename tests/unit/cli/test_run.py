"""The run command without a hub: its line, its place, and how a program runs as `__main__`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from guava_nb.cli import run
from guava_nb.cli.main import build_parser
from guava_nb.cli.run import Outcome, place_from, run_program
from guava_nb.errors import ConfigError
from guava_nb.protocol.joincode import JoinCode

MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_programs_arguments_are_its_own() -> None:
    args = build_parser().parse_args(["run", "--rank", "1", "train.py", "--rank", "7", "-m", "x"])
    assert (args.rank, args.program, args.arguments, args.module) == (1, "train.py", ["--rank", "7", "-m", "x"], False)
    args = build_parser().parse_args(["run", "-m", "pkg.train", "--lr", "1"])
    assert (args.program, args.arguments, args.module) == ("pkg.train", ["--lr", "1"], True)


def test_the_line_wins_over_the_environment() -> None:
    code = JoinCode.new("127.0.0.1", 1234)
    args = build_parser().parse_args(["run", "--rank", "1", "train.py"])
    environ = {"RANK": "0", "WORLD_SIZE": "2", "GUAVA_JOIN_CODE": code.encode(), "MASTER_ADDR": "x"}
    place = place_from(args, environ)
    assert (place.rank, place.world_size, place.code, place.backend) == (1, 2, code, "guava")
    assert "GUAVA_JOIN_CODE" not in environ, "the secret must not stay for the program"


def test_torchruns_environment_needs_no_code() -> None:
    args = build_parser().parse_args(["run", "--backend", "gloo", "train.py"])
    place = place_from(args, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    assert (place.rank, place.code, place.backend) == (1, None, "gloo")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["--world-size", "2"], "--rank is missing"),
        (["--rank", "0"], "--world-size is missing"),
        (["--rank", "2", "--world-size", "2"], "no rank 2 among 2"),
        (["--rank", "0", "--world-size", "2", "--wait", "0"], "--wait must be above 0"),
    ],
)
def test_what_is_no_place(line: list[str], sentence: str) -> None:
    args = build_parser().parse_args(["run", *line, "train.py"])
    with pytest.raises(ConfigError, match=sentence):
        place_from(args, {"GUAVA_JOIN_CODE": JoinCode.new("127.0.0.1", 1234).encode()})


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("", Outcome(0)),
        ("import sys; sys.exit()", Outcome(0)),
        ("import sys; sys.exit(7)", Outcome(7, "its program ended with exit status 7")),
        ("import sys; sys.exit('no data')", Outcome(1, "its program ended with exit status 1")),
        ("raise ValueError('a  b')", Outcome(1, "its program ended with ValueError: a b")),
        ("raise KeyboardInterrupt", Outcome(130, "its program was interrupted")),
    ],
)
def test_how_it_ended(body: str, outcome: Outcome, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    assert run_program(str(script), []) == outcome


def test_it_runs_as_main_beside_its_own_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, beside.word, sys.argv[1:])")
    assert run_program(str(script), ["--lr", "1"]).status == 0
    assert capsys.readouterr().out == "__main__ beside ['--lr', '1']\n"


def test_a_traceback_shows_the_program_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    raise ValueError('x')\nf()")
    run_program(str(script), [])
    shown = capsys.readouterr().err
    assert "script.py" in shown and "runpy" not in shown and Path(run.__file__).name + '"' not in shown


def test_an_mpi_needs_neither_code_nor_numbers() -> None:
    environ = dict(MPI)
    place = place_from(build_parser().parse_args(["run", "train.py"]), environ)
    assert (place.rank, place.world_size, place.code) == (3, 4, None)
    assert (environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]) == ("1", "2"), "the program picks its GPU by it"


@pytest.mark.parametrize(
    ("line", "environ", "sentence"),
    [
        (["--world-size", "4"], {"WORLD_SIZE": "4"}, "--rank is missing, and RANK is not set: give --rank"),
        ([], {"RANK": "1"}, "--world-size is missing, and WORLD_SIZE is not set"),
        ([], {"RANK": "one", "WORLD_SIZE": "4"}, "RANK should be a whole number and is 'one'"),
        ([], {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}, "no rank 4 among 4"),
        (
            [],
            {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
            "the batch script or the shell of Slurm's job 17",
        ),
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "completionMode: Indexed"),
        ([], {"JOB_COMPLETION_INDEX": "2"}, "--world-size is missing"),
        ([], {**MPI, "RANK": "0", "WORLD_SIZE": "1"}, "Open MPI says that this is rank 3 of 4: unset RANK"),
        (["--rank", "0"], MPI, "--rank is 0 on the line, and Open MPI says 3: leave --rank out"),
        (["--world-size", "2", "--rank", "1"], MPI, "--rank is 1 on the line"),
    ],
)
def test_what_says_half_of_a_place_or_two(line: list[str], environ: dict[str, str], sentence: str) -> None:
    args = build_parser().parse_args(["run", *line, "train.py"])
    with pytest.raises(ConfigError, match=sentence):
        place_from(args, dict(environ))


def test_one_number_may_stand_on_the_line_and_the_other_in_the_environment() -> None:
    args = build_parser().parse_args(["run", "--world-size", "4", "train.py"])
    place = place_from(args, {"RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"})
    assert (place.rank, place.world_size) == (1, 4)


def test_a_start_within_a_start_has_its_own_numbers() -> None:
    ranks = {"RANK": "7", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert place_from(build_parser().parse_args(["run", "train.py"]), {**MPI, **ranks}).rank == 7
    args = build_parser().parse_args(["run", "--rank", "7", "--world-size", "8", "train.py"])
    assert place_from(args, dict(MPI)).rank == 7


def test_half_of_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('it must not run')")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="MASTER_PORT is not: set both"):
        run.run(build_parser().parse_args(["run", str(tmp_path / "train.py")]))


def test_a_code_leads_away_from_what_started_the_process() -> None:
    code = JoinCode.new("127.0.0.1", 1234)
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "GUAVA_JOIN_CODE": code.encode()}
    assert place_from(build_parser().parse_args(["run", "--rank", "1", "train.py"]), environ).code == code


@pytest.mark.parametrize(
    ("line", "environ", "sentence"),
    [
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "there is rank 0 alone"),
        ([], {}, "start several processes, as in torchrun"),
        (["--rank", "2", "--world-size", "2"], {}, "no rank 2 among 2"),
        (["--join", "x"], {"RANK": "0", "WORLD_SIZE": "2"}, "opens a session and joins none"),
        ([], {"PMI_RANK": "0", "PMI_SIZE": "2"}, "set MASTER_ADDR"),
    ],
)
def test_what_cannot_orchestrate(
    line: list[str], environ: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('it must not run')")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    args = build_parser().parse_args(["run", "--orchestrate", *line, str(tmp_path / "train.py")])
    with pytest.raises(ConfigError, match=sentence):
        run.run(args)
