"""What users of pipeline tools stumbled on: each a small model that must train as if there were no pipeline."""
