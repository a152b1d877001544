"""The version, written down once: pyproject.toml reads it from here, and so does a checkout that is not installed."""

VERSION = "0.1.0"
