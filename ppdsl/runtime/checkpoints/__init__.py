"""Weights and states by their plain names: filled in, saved, and loaded into any other division of the model."""
