"""JSON Schemas of what commands read and print, from the records: docs/schemas/NAME.json, the version in each."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN, SILENT
from mindspeed_autoparallel.cost.analytic.spellings import ALIASES, INFORMATION
from mindspeed_autoparallel.data.distribution import FORMAT, SCHEMA_VERSION, Distribution
from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.results import RESULT_SCHEMA_VERSION, Result
from mindspeed_autoparallel.predict.answers import Predictions, Tuning
from mindspeed_autoparallel.predict.predict import SCHEMA_VERSION as PREDICTION_VERSION
from mindspeed_autoparallel.profiles.profile import PROFILE_FORMAT, PROFILE_SCHEMA_VERSION, Profile
from mindspeed_autoparallel.report.data import REPORT_SCHEMA_VERSION, Report
from mindspeed_autoparallel.spec.plan import PLAN_FORMAT, PLAN_SCHEMA_VERSION, Plan

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, str]:
    """Return the text of every schema by its name."""
    made = {
        "plan": _of_record(Plan, "plan", PLAN_SCHEMA_VERSION, PLAN_FORMAT),
        "profile": _of_record(Profile, "profile", PROFILE_SCHEMA_VERSION, PROFILE_FORMAT),
        "data": _of_record(Distribution, "data", SCHEMA_VERSION, FORMAT),
        "prediction": _of_record(Predictions, "prediction", PREDICTION_VERSION),
        "tuning": _of_record(Tuning, "tuning", 2),
        "report": _of_record(Report, "report", REPORT_SCHEMA_VERSION),
        "result": _of_record(Result, "result", RESULT_SCHEMA_VERSION),
        "request": _head("request", 1) | _request(),
        "error": _head("error", 1) | _error(),
    }
    return {name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n" for name, schema in made.items()}


def _head(name: str, version: int) -> dict[str, Any]:
    return {"$schema": _DRAFT, "$id": f"mindspeed-autoparallel/{name}-{version}.json", "version": version}


def _of_record(kind: Any, name: str, version: int, file_format: str = "") -> dict[str, Any]:
    """Return the schema of a record; its version, and the format of a file, are the only ones allowed."""
    made = msgspec.json.schema(kind, schema_hook=lambda _: {"description": "any value"})
    top = made["$defs"][made["$ref"].rsplit("/", 1)[-1]]
    top["properties"]["schema_version"] = {"const": version}
    top["required"] = sorted({*top.get("required", []), "schema_version"})
    if file_format:
        top["properties"]["format"] = {"const": file_format}
        top["required"] = sorted({*top["required"], "format"})
    return _head(name, version) | made


def _request() -> dict[str, Any]:
    """Return the schema of ``predict``'s file. A key that is unknown is named in an answer's notes and changes nothing;
    ``model`` may also have Megatron's names or be a Hugging Face config.json."""
    sections = {
        section: {
            "type": "object",
            "properties": {key: {} for key in sorted(keys | ALIASES[section].keys() | SILENT[section])},
        }
        for section, keys in KNOWN.items()
    }
    one = {
        "type": "object",
        "properties": {**{key: {} for key in sorted(INFORMATION)}, **sections},
        "required": ["model", "hw", "train"],
    }
    many = {"type": "object", "properties": {"requests": {"type": "array", "items": one}}, "required": ["requests"]}
    return {"title": "Request", "anyOf": [many, one]}


def _error() -> dict[str, Any]:
    codes = sorted(kind.__name__ for kind in AutoParallelError.__subclasses__())
    return {
        "title": "Error",
        "description": "What a command with --json prints where it fails; the exit code is 2, or 3 where nothing fits.",
        "type": "object",
        "properties": {
            "status": {"enum": ["error", "infeasible"]},
            "code": {"enum": [*codes, "usage"]},
            "reason": {"type": "string"},
        },
        "required": ["status", "code", "reason"],
    }
