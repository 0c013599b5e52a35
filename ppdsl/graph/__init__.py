"""The stage graph: what a recording found out about a model, as frozen data. No torch here."""
