"""Profiles a process from outside its training loop: what a contestant does in its steps, as `torch.profiler` saw it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

#: Names under which a wait of the host for the device stands in a profile.
SYNCS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "Memcpy DtoH (Device -> Pageable)",
    "Memcpy HtoD (Pageable -> Device)",
)
REQUEST = "profile"
#: The environment's name for the folder.
FOLDER = "GPU_ROWS_WATCH"


class Watch:
    """One profile of all threads of this process, with the peak of its device memory meanwhile."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_allocated(device):
                    torch.cuda.reset_peak_memory_stats(device)
        self._profile = profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
        self._profile.start()

    def end(self, table: Path | None) -> dict[str, Any]:
        """Stop; returns counts per optimizer step. The table of all operations is written to `table`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        averages = self._profile.key_averages()
        counts = {event.key: event.count for event in averages}
        steps = max((n for key, n in counts.items() if key.startswith("Optimizer.step#")), default=0)
        if table is not None:
            by_host = averages.table(sort_by="self_cpu_time_total", row_limit=60, max_name_column_width=90)
            text = f"{steps} steps\n\n{by_host}\n"
            if torch.cuda.is_available():
                by_device = averages.table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
                text += f"\n{by_device}\n"
            table.write_text(text)
        peak = 0
        if torch.cuda.is_available():
            peak = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        syncs = {name: round(counts[name] / max(1, steps), 2) for name in SYNCS if name in counts}
        return {"steps": steps, "peak_bytes": peak, "syncs": syncs}


def watch_worker() -> None:
    """In a worker of `gpu.py`: profile this process whenever a file named `REQUEST` lies in `FOLDER`'s folder.

    Answers lie beside it, one file a process. Elsewhere this does nothing.
    """
    folder = os.environ.get(FOLDER)
    if folder is None or "guava_nb.worker.process" not in sys.orig_argv:
        return
    if any(thread.name == "gpu-rows-watch" for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(Path(folder),), name="gpu-rows-watch", daemon=True).start()


def _watch(folder: Path) -> None:
    request = folder / REQUEST
    while True:
        time.sleep(0.05)
        if not request.exists():
            continue
        watch = Watch()
        (folder / f"started-{os.getpid()}").touch()
        while request.exists():
            time.sleep(0.02)
        answer = watch.end(folder / f"table-{os.getpid()}.txt")
        partial = folder / f"partial-{os.getpid()}"
        partial.write_text(json.dumps(answer))
        partial.rename(folder / f"answer-{os.getpid()}.json")
