"""Run a message plan: in one process, or with torch.distributed. Needs torch."""
