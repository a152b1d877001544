"""The HTTP API against a scripted engine."""
