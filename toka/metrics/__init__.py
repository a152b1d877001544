"""What the engine tells of itself while it runs: for Prometheus, for statsd, and as a line in the log."""
