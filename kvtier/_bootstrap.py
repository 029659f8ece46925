"""Bootstrap of the package: folder that its modules are imported from, and prefix of its log lines."""

import logging
import os
import sys
from collections.abc import Sequence

PREFIX = "kvtier: "


def installed_instead(own: Sequence[str]) -> list[str]:
    """Return the folders in which kvtier's modules are searched. own: the folder that Python found first.

    In a checkout that is `kvtier/`, without the connectors beside it and without the native library. Python finds it
    before an installed kvtier when it runs in the checkout, as `python -m vllm...` does; then all modules come from
    the installed one. Where that is an editable install, they are the checkout's anyway.
    """
    if any(os.path.isdir(os.path.join(folder, "connectors")) for folder in own):
        return list(own)
    for entry in sys.path:
        folder = os.path.join(entry, "kvtier")
        if os.path.isfile(os.path.join(folder, "connectors", "__init__.py")):
            return [folder]
    return list(own)


class _Named(logging.Filter):
    """Begins each line with "kvtier: ", for `grep` among an engine's."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.startswith(PREFIX):
            record.msg, record.args = PREFIX + text, ()
        return True


def name_log_lines() -> None:
    """Set the prefix of log lines on the logger that all modules use."""
    log = logging.getLogger("kvtier")
    if not any(isinstance(each, _Named) for each in log.filters):
        log.addFilter(_Named())
