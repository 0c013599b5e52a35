"""Ranks as processes of torch.distributed, and what ends every wait when one of them fails."""
