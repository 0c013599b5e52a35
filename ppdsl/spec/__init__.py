"""The `.ppspec` language: a partition of a model as text, checked against the model."""
