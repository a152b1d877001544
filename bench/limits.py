"""What the operating system grants a process."""

import resource


def many_files() -> None:
    """Let this process, and those it starts, have as many connections as it may: each is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
