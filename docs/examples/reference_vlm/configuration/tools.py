"""tools.json of MindSpeed-MM: its profiling switches belong to that host; here the file is only checked."""

from __future__ import annotations

import sys
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json


def read_tools(file: Path) -> dict[str, object]:
    """Return the content of ``file``; a tool that is switched on there is named once as having no effect here."""
    values = read_json(file, "tool description (--mm-tool)")
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: the file must be an object of tool: settings pairs, not {values!r}.")
    switched_on = [name for name, settings in values.items() if isinstance(settings, dict) and settings.get("enable")]
    if switched_on:
        print(f"{file}: tools without effect on this host: {', '.join(switched_on)}", file=sys.stderr)
    return values
