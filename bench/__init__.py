"""Load generators and measurements, and the server they start for themselves."""
