"""Incremental readers of answers: thoughts, text and tool calls out of what the model writes."""
