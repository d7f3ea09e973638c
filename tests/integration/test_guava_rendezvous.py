"""`guava://JOINCODE`: programs that know nothing but a join code form a group at somebody's hub, run after run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.hub_ranks import Hub

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(60, exit=True)  # where it waits, should it wait
import torch, torch.distributed as dist
import guava_nb.backend
code, rank = sys.argv[1], int(sys.argv[2])
for run in range(2):
    dist.init_process_group("guava", init_method=f"guava://{code}", rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == 3.0
    pair = dist.new_group([0, 1])
    dist.broadcast(tensor, 1, group=pair)
    dist.destroy_process_group()
print("fine")
"""


def test_two_programs_meet_at_a_hub_again_and_again(tmp_path: Path) -> None:
    hub = Hub()
    (tmp_path / "program.py").write_text(PROGRAM)
    try:
        code = hub.listener.join_code().encode()
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.script", str(tmp_path / "program.py"), code, str(rank)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        for program in programs:
            try:
                output, _ = program.communicate(timeout=80)
            finally:
                program.kill()
            assert program.returncode == 0 and output.strip().endswith("fine"), output
        assert hub.relay.figures() == {}  # every group was left by all
    finally:
        hub.listener.close()
