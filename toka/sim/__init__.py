"""The real core and the real wire with a pretend GPU."""
