"""Sources, their names and their order of precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb import GPUTrainer, Orchestrator
from guava_nb.config import DistributedConfig
from guava_nb.config.folder_risks import folder_notice, folder_risks
from guava_nb.errors import ConfigError

SEED_ENVIRONMENT = {
    "MASTER_IP": "192.168.0.177",
    "MASTER_PORT": "29500",
    "NUM_WORKERS": "2",
    "DATA_PARALLEL": "1",
    "MODEL_PARALLEL": "0",
    "PIPELINE_PARALLEL": "0",
    "TENSOR_PARALLEL": "0",
    "MICRO_BATCHES": "8",
    "TENSOR_PARALLEL_SIZE": "4",
    "COMPACT_LOG": "0",
    "LOG_STEP_EVERY": "50",
    "LOG_ACT": "1",
    "ACT_TIMEOUT_SEC": "1.5",
    "ACK_TIMEOUT_SEC": "2",
    "RESENDS_MAX": "3",
    "RESEND_PROBE_SEC": "7",
}

SPLIT_YAML = """
network:
  gpu_host: "192.168.1.100"
  cpu_host: "192.168.1.200"
  port: 29500

training:
  batch_size: 64
  num_workers: 4
  epochs: 10
  learning_rate: 1e-3
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(**arguments: object) -> DistributedConfig:
    return DistributedConfig.load(**{"environ": {}, **arguments})  # type: ignore[arg-type]


def test_every_variable_of_the_guava_seed_is_read() -> None:
    config = DistributedConfig.from_env(SEED_ENVIRONMENT)
    assert (config.master_ip, config.master_port, config.num_workers) == ("192.168.0.177", 29500, 2)
    assert (config.data_parallel, config.tensor_parallel, config.tensor_parallel_size) == (True, False, 4)
    assert (config.micro_batches, config.compact_log, config.log_step_every, config.log_act) == (8, False, 50, True)
    assert (config.activation_timeout, config.ack_timeout) == (1.5, 2.0)
    assert (config.max_resends, config.resend_probe_interval) == (3, 7.0)
    assert config.layers_per_gpu == {0: (0, 12), 1: (0, 12)}


def test_every_field_has_a_guava_variable_and_it_wins_over_the_older_name() -> None:
    texts = {name: "none" if value is None else str(value) for name, value in DistributedConfig().to_dict().items()}
    assert DistributedConfig.from_env({f"GUAVA_{name.upper()}": text for name, text in texts.items()}).to_dict() == (
        DistributedConfig().to_dict()
    )
    assert DistributedConfig.from_env({"NUM_WORKERS": "3", "GUAVA_NUM_WORKERS": "5"}).num_workers == 5


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUAVA_BATCH_SIZE", "17")
    assert DistributedConfig.from_env().batch_size == 17
    assert DistributedConfig.load().batch_size == 17


def test_an_empty_variable_counts_as_not_set() -> None:
    assert DistributedConfig.from_env({"MASTER_IP": "", "NUM_WORKERS": " "}) == DistributedConfig()


def test_a_misspelt_variable_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(ConfigError, match=r'GUAVA_BATCHSIZE.*Did you mean "GUAVA_BATCH_SIZE"'):
        DistributedConfig.from_env({"GUAVA_BATCHSIZE": "8"})
    assert DistributedConfig.from_env(
        {"GUAVA_JOIN_CODE": "x", "GUAVA_UI": "text", "GUAVA_TEST": "1", "GUAVA_TREE": "y"}
    )


def test_precedence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("batch_size: 1\nseed: 1\nnum_workers: 1\nd_ff: 1\n")
    (tmp_path / ".env").write_text("BATCH_SIZE=2\nGUAVA_SEED=2\nNUM_WORKERS=2\n")
    config = load(environ={"BATCH_SIZE": "3", "GUAVA_SEED": "3"}, batch_size=4)
    assert (config.batch_size, config.seed, config.num_workers, config.d_ff, config.d_model) == (4, 3, 2, 1, 768)
    assert config.origin("batch_size") == "argument"
    assert config.origin("seed") == "environment variable GUAVA_SEED"
    assert config.origin("num_workers") == "NUM_WORKERS in file .env"
    assert config.origin("d_ff") == "d_ff in file config.yaml"
    assert config.origin("d_model") == "default"


def test_the_plain_name_in_the_environment_wins_over_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GUAVA_NUM_WORKERS=2\n")
    assert load(environ={"NUM_WORKERS": "3"}).num_workers == 3


def test_split_yaml_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPLIT_YAML)
    config = load(path=tmp_path / "mine.yaml")
    assert (config.gpu_host, config.master_ip, config.master_port) == ("192.168.1.100", "192.168.1.200", 29500)
    assert (config.batch_size, config.loader_workers, config.num_epochs) == (64, 4, 10)
    assert config.learning_rate == pytest.approx(0.001)
    assert config.num_workers == 1


def test_split_env_file_names(tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text("GPU_HOST=10.0.0.1\nCPU_HOST=10.0.0.2\nTRAINING_PORT=29501\nBATCH_SIZE=64\n")
    config = load(env_file=tmp_path / "my.env")
    assert (config.gpu_host, config.master_ip, config.master_port, config.batch_size) == (
        "10.0.0.1",
        "10.0.0.2",
        29501,
        64,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bacth_size: 3", r"'bacth_size' is no setting \(from file config.yaml\)\. Did you mean \"batch_size\""),
        ("netwrok:\n  port: 1", r"netwrok.*Did you mean \"network\""),
        ("training:\n  epoch: 1", r"'training.epoch'.*Did you mean \"epochs\""),
        ("network: 3", "section 'network'.*must hold names with values, not 3"),
        ("batch_size: 3\ntraining:\n  batch_size: 4", "batch_size is set twice"),
        ("- 1\n- 2", "must hold names with values"),
        ("a: [", "cannot read file config.yaml"),
        ("batch_size: -4", r"batch_size is -4 \(from batch_size in file config.yaml\); it must be at least 1"),
        (
            "batch_size: many",
            r"batch_size is 'many' \(from batch_size in file config.yaml\).*a whole number",
        ),
        ("training:\n  num_workers: 1.5", "loader_workers is 1.5.*training.num_workers in file.*whole number"),
        ("master_ip: 10", "it must be a text, not int"),
    ],
)
def test_yaml_refusals(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load()


def test_empty_yaml_is_fine(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# nothing yet\n")
    assert load() == DistributedConfig()


def test_a_named_file_must_be_there() -> None:
    with pytest.raises(ConfigError, match="there is no file other.yaml"):
        load(path="other.yaml")
    with pytest.raises(ConfigError, match="there is no file other.env"):
        load(env_file="other.env")


def test_a_wrong_value_that_is_overridden_hurts_nobody() -> None:
    assert load(environ={"BATCH_SIZE": "many"}, batch_size=4).batch_size == 4


def test_wrong_environment_value_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="batch_size is 'x' .from environment variable BATCH_SIZE"):
        load(environ={"BATCH_SIZE": "x"})


def test_unknown_argument_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"'batchsize' is no setting \(from argument\)\. Did you mean \"batch_size\""):
        load(batchsize=3)


def test_what_weakens_security_in_a_file_of_the_folder_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_risks(DistributedConfig.load(environ={})) == {}
    Path(".env").write_text("GUAVA_TLS=off\nGUAVA_TUNNEL=cloudflared:./a\nMASTER_IP=127.0.0.1\nGUAVA_SEED=3\n")
    Path("config.yaml").write_text("workers_on: docker:2\nmaster_ip: 0.0.0.0\ntls: true\n")
    config = DistributedConfig.load(environ={})
    assert folder_risks(config) == {
        "tls": "GUAVA_TLS in file .env",
        "tunnel": "GUAVA_TUNNEL in file .env",
        "workers_on": "workers_on in file config.yaml",
    }
    assert list(folder_risks(config.replace(tls=False, seed=1))) == ["tunnel", "workers_on"], "by hand is wanted"
    said = DistributedConfig.load(environ={"GUAVA_TLS": "0"}, tunnel="ngrok", workers_on="", master_ip="0.0.0.0")
    assert folder_risks(said) == {}
    Path(".env").unlink()
    assert folder_risks(DistributedConfig.load(environ={})) == {
        "workers_on": "workers_on in file config.yaml",
        "master_ip": "master_ip in file config.yaml",
    }
    named = tmp_path / "mine.env"
    named.write_text("GUAVA_TLS=off\n")
    assert "tls" not in folder_risks(DistributedConfig.load(env_file=named, environ={}))
    Path(".env").write_text("GUAVA_TLS=off\n")
    with Orchestrator(DistributedConfig.load(environ={}, workers_on="", master_ip="127.0.0.1")) as session:
        assert any("tls (GUAVA_TLS in file .env). It weakens" in note for note in session.status().notes)


def test_each_setting_of_the_folder_that_hands_over_a_session_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("GUAVA_SESSION_FILE=./session.json\nGUAVA_PATH=direct\nGPU_HOST=0.0.0.0\n")
    config = DistributedConfig.load(environ={})
    assert folder_risks(config) == {
        "session_file": "GUAVA_SESSION_FILE in file .env",
        "path": "GUAVA_PATH in file .env",
    }
    assert folder_risks(config, of_a_worker=True) == {"gpu_host": "GPU_HOST in file .env"}
    assert "session_file (GUAVA_SESSION_FILE in file .env), path (" in folder_notice(config)
    Path(".env").write_text("GUAVA_SESSION_FILE=off\nGUAVA_PATH=relay\nGPU_HOST=127.0.0.1\n")
    assert folder_notice(DistributedConfig.load(environ={})) == ""
    assert folder_notice(DistributedConfig.load(environ={}), of_a_worker=True) == ""


def test_a_listening_worker_tells_what_weakens_it_in_a_file_of_the_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("tls: false\ngpu_host: 0.0.0.0\n")
    GPUTrainer(device="cpu")
    assert (
        "tls (tls in file config.yaml), gpu_host (gpu_host in file config.yaml). It weakens" in capsys.readouterr().out
    )
