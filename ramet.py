"""Ramet."""
