"""XLA devices: one process drives all of them. Needs torch_xla."""
