"""Log lines of a worker: as text, or as one JSON object each, of the same fields as the engine's."""

import logging
import sys
import time

import msgspec

from workers.config import Config


class Text(logging.Formatter):
    """Each line begins with who speaks."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(f"worker{'' if rank is None else f' {rank}'}: %(message)s")


class Json(logging.Formatter):
    """A line is an object of `time` (UTC), `level`, `logger`, `message`, `rank` once it is known and, of a failure,
    `traceback`."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._more = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the message."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line | self._more).decode()


def set_up(config: Config) -> None:
    """Log to stderr as the options say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if config.log_format == "json" else Text())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


def call(rank: int) -> None:
    """From now on lines say which worker speaks."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, (Text, Json)):
            handler.setFormatter(type(handler.formatter)(rank))
