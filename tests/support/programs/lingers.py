"""Goes on after its last line: a thread that reduces, and a function that destroys the group at the exit."""

import atexit
import threading

import torch
import torch.distributed as dist

dist.init_process_group()


def go_on() -> None:
    total = torch.ones(1)
    threading.main_thread().join()
    for _ in range(5):
        dist.all_reduce(total)
    print("thread", float(total), flush=True)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()
    print("left", flush=True)


atexit.register(leave)
threading.Thread(target=go_on).start()
print("last line", flush=True)
