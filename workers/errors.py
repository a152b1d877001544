"""What can go wrong in a worker."""


class WorkerError(Exception):
    """The worker cannot go on, through no fault of its own code. `str(error)` is one line that says what to do."""
