"""One model spread over the ranks of a process group. Knows torch.distributed; knows no session and no hub."""
