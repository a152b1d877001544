"""Log lines: as text, or as one JSON object each."""

import logging
import time

import msgspec

from toka.config import Config

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = ("request_id", "method", "path", "status", "seconds")
"""What a line may say of a request besides its message, given as `extra`."""


class Json(logging.Formatter):
    """A line is an object of `time` (UTC), `level`, `logger`, `message`, what FIELDS there are, and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the message."""
        more = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            more["traceback"] = self.formatException(record.exc_info)
        return json_line(record.getMessage(), record.levelname.lower(), record.name, record.created, **more)


def json_line(message: str, level: str, logger: str, at: float | None = None, **more: object) -> str:
    """A line of the log. `at`: Unix time; now, if not said."""
    at = time.time() if at is None else at
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"
    return msgspec.json.encode({"time": when, "level": level, "logger": logger, "message": message} | more).decode()


def set_up(config: Config) -> None:
    """Log to stderr as the options say."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if config.log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
