"""`python -m workers engine=tcp://HOST:PORT`: one worker; `python -m workers convert …`: prepare a model."""

import os
import sys
from collections.abc import Sequence

from workers.config import OptionError, parse, usage
from workers.logs import set_up

SPIN_COUNT = "1000"
"""Turns that a thread of torch's (GNU OpenMP's) waits awake for the others of its team. Its own choice is to wait awake
for milliseconds, and one core taken by another process then costs a stream of tokens nine tenths of its speed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; 2 for a wrong option. torch is imported only once the options are right."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["convert"]:
        from workers.convert import main as convert

        return convert(arguments[1:])
    if arguments and arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    try:
        config = parse(arguments, os.environ)
        set_up(config)
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
        from workers.life import live

        return live(config)
    except OptionError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
