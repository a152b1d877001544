"""The load generators."""
