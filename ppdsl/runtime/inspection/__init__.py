"""What `ppdsl doctor` asks of a machine."""
