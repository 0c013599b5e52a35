"""The command line: what it prints, where, and its exit codes."""
