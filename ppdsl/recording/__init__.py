"""How a forward pass becomes a graph of stage programs."""
