"""The proof as a command: ``python -m tests.schedules --help``."""
