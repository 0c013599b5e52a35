"""Every code that ppdsl can report, each with an example that makes it appear."""
