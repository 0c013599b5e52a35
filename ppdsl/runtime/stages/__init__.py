"""One stage while it runs."""
