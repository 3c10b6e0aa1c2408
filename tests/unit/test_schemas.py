"""Published schemas: what commands write is valid, what is broken is not, and every file has its version."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from example_plan import example_plan
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.hetero.compare import HeteroOptions
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.results import result_of
from mindspeed_autoparallel.planner.wanted import Wanted, find_plan
from mindspeed_autoparallel.report.data import report_data
from mindspeed_autoparallel.spec import Cluster, to_json

FOUR = Cluster(num_nodes=1, devices_per_node=4)
WANTED = Wanted(cluster=FOUR, global_batch_size=8, options=SearchOptions(), hetero=HeteroOptions())
ROOT = Path(__file__).parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "docs" / "schemas").glob("*.json")}


def _check(name: str, value: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(json.dumps(value)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What commands write and print, by the name of its schema."""
    folder = tmp_path_factory.mktemp("written")
    small_profile().write(folder / "profile.json")
    plan = search(small_profile(), Cluster(num_nodes=2, devices_per_node=4), 16)
    return {
        "profile": json.loads((folder / "profile.json").read_text("utf-8")),
        "plan": to_json(plan),
        "report": to_json(report_data(plan)),
        "result": result_of(plan),
        "request": json.loads((ROOT / "docs" / "examples" / "requests.json").read_text("utf-8")),
    }


def test_schemas_are_schemas_and_name_their_version() -> None:
    assert set(SCHEMAS) >= {"plan", "profile", "request", "prediction", "report", "result", "tuning", "error"}
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"mindspeed-autoparallel/{name}-{schema['version']}.json"


@pytest.mark.parametrize("name", ["profile", "plan", "report", "result", "request"])
def test_written_files_are_valid(name: str, written: dict[str, Any]) -> None:
    _check(name, written[name])


def test_an_example_with_everything_is_valid() -> None:
    _check("plan", to_json(example_plan()))
    _check("report", to_json(report_data(example_plan())))


def test_every_value_inside_a_report_has_its_kind() -> None:
    """A list in place of any single value is refused, however deep it is."""
    plan = example_plan()
    for drawn in (plan, replace(plan, num_microbatches=4000), find_plan(small_profile(), WANTED).hetero):
        report = _first_of_lists(to_json(report_data(drawn)))
        _check("report", report)
        places = list(_values(report))
        assert len(places) > 90
        for holder, key in places:
            right, holder[key] = holder[key], [["wrong"]]
            with pytest.raises(jsonschema.ValidationError):
                _check("report", report)
            holder[key] = right


def _first_of_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _first_of_lists(item) for key, item in value.items()}
    return [_first_of_lists(item) for item in value[:1]] if isinstance(value, list) else value


def _values(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Return (what holds it, its key) of every value that is neither a list nor an object."""
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, (dict, list)):
            yield from _values(value)
        else:
            yield holder, key


@pytest.mark.parametrize("name", ["profile", "plan", "report", "result"])
def test_another_version_a_missing_key_and_a_wrong_kind_are_not(name: str, written: dict[str, Any]) -> None:
    for key in list(written[name])[:6]:
        broken = copy.deepcopy(json.loads(json.dumps(written[name])))
        broken[key] = object.__name__ if not isinstance(broken[key], str) else 7
        with pytest.raises(jsonschema.ValidationError):
            _check(name, broken)
    if "schema_version" in written[name]:
        with pytest.raises(jsonschema.ValidationError):
            _check(name, {**written[name], "schema_version": 999})


def test_answers_and_errors_of_commands_are_valid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    request = str(ROOT / "docs" / "examples" / "requests.json")
    assert main(["predict", "--request", request, "--json"]) == 0
    _check("prediction", json.loads(capsys.readouterr().out))
    small = json.loads((ROOT / "docs" / "examples" / "request.json").read_text("utf-8"))
    small["model"].update(num_layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096)
    small["hw"]["num_gpus"] = 2
    (tmp_path / "request.json").write_text(json.dumps(small))
    words = ["--time-limit-s", "5", "--num-workers", "1", "--json"]
    assert main(["tune", "--request", str(tmp_path / "request.json"), *words]) == 0
    _check("tuning", json.loads(capsys.readouterr().out))
    assert main(["report", "--plan", str(tmp_path / "none.json"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)
    _check("error", error)
    with pytest.raises(jsonschema.ValidationError):
        _check("error", {**error, "code": "Another"})
