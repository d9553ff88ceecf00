"""The agent language: Python programs that compile to prefix-sharing requests."""
