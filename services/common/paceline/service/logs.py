"""Structured logs on stderr: JSON lines, or readable text on a terminal.

Fields are passed as `logger.info("round refused", extra={"round_id": 7})`. Prompts, tokens,
handles and secrets must not be logged.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["auto", "json", "text"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the call whose handler runs; set by the runtime, added to every record."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(format: LogFormat = "auto", level: str = "INFO") -> None:
    """Send all logs of this process to stderr.

    Args:
        format: "auto" is "text" when stderr is a terminal and "json" otherwise.
        level: least severe level shown, such as "DEBUG".
    """
    readable = format == "text" or (format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if readable else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:34:56.789 INFO paceline.service message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{time} {record.levelname} {record.name} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    current = request_id.get()
    return {"request_id": current, **fields} if current is not None else fields
