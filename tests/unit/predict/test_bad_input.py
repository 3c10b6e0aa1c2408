"""What the tuning commands say to bad input: one sentence with the way out, exit code 2, no traceback."""

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main

_REQUEST = {
    "model": {"num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {},
    "train": {"gbs": 32},
}


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_a_search_on_an_unknown_device_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**_REQUEST, "hw": {"gpu": "NOPE", "num_gpus": 8}}))
    said = _refusal(["tune", "--request", str(path)], capsys)
    assert "unknown device 'NOPE'" in said
    assert "H100" in said
    assert "--device-file" in said


def test_requests_cut_off_in_the_middle_name_the_file_and_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.json"
    path.write_text('{"requests": [\n')
    said = _refusal(["predict", "--request", str(path)], capsys)
    assert str(path) in said
    assert "line 2" in said


def test_a_knowledge_base_that_is_no_database_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "base.sqlite"
    path.write_bytes(b"not a database " * 300)
    said = _refusal(["knowledge", "show", str(path)], capsys)
    assert str(path) in said
    assert "Move it away" in said


def test_a_knowledge_base_that_is_not_there_is_not_created_by_showing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "base.sqlite"
    assert str(path) in _refusal(["knowledge", "show", str(path)], capsys)
    assert not path.exists()


def _answers(
    requests: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[str, str]:
    path = tmp_path / "requests.json"
    path.write_text(json.dumps({"requests": requests}))
    assert main(["predict", "--request", str(path), *flags]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def _request(section: str, **changes: object) -> dict[str, object]:
    full = {**_REQUEST, "train": {"gbs": 32, "mbs": 1}}
    return {**full, section: {**full[section], **changes}}


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        ("hw", {"gpu": ["A100"]}, "hw.gpu is ['A100']"),
        (
            "hw",
            {"num_gpus": 64, "gpus_per_node": 7},
            "does not fill nodes of gpus_per_node 7; the nearest are 63 and 70",
        ),
        ("hw", {"num_gpus": 10**18}, "must be at most"),
        ("model", {"swiglu": "yes"}, "model.swiglu is 'yes', must be true or false"),
        ("parallel", {"sp": "yes"}, "parallel.sp is 'yes', must be true or false"),
        ("parallel", {"dist_opt": 2}, "parallel.dist_opt is 2, must be true or false"),
        ("train", {"mbs": 64}, "global batch 32 is not divisible by DP 8 x MBS 64; the least is 512"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_may_stand_there(
    section: str, changes: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = _answers([_request(section, **changes), _request("hw")], tmp_path, capsys)
    assert reason in said


def test_unknown_keys_are_named_because_they_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, _ = _answers([_request("parallel", tpp=8), _request("parallel", tp=1)], tmp_path, capsys)
    assert said.count("note: ") == 1
    assert "note: parallel.tpp: unknown; ignored" in said


def test_an_id_cannot_move_the_cursor_and_a_repeated_one_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [{**_request("hw"), "id": name} for name in ("a\n\x1b[2J", "twice", "twice", None, None)]
    said, told = _answers(requests, tmp_path, capsys)
    assert "\x1b" not in said
    assert len(said.splitlines()) == 1 + len(requests)
    assert 'in the order of the requests: "twice"' in told
    answers, _ = _answers(requests, tmp_path, capsys, "--json")
    assert [answer["id"] for answer in json.loads(answers)["predictions"]] == [item["id"] for item in requests]


@pytest.mark.parametrize("command", [["predict", "--request"], ["tune", "--request"], ["scoreboard"], ["plan"]])
def test_json_that_is_nested_too_deeply_is_refused_with_the_reason(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    plan = ["--nnodes", "1", "--nproc-per-node", "8", "--global-batch-size", "8", "--profile"]
    said = _refusal([*command, *(plan if command == ["plan"] else []), str(path)], capsys)
    assert "nested too deeply" in said


def test_an_empty_list_of_requests_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.json"
    path.write_text('{"requests": []}')
    assert main(["predict", "--request", str(path)]) == 0
    assert "holds no request" in capsys.readouterr().err


def test_a_search_without_legal_layouts_gives_the_reason_with_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**_REQUEST, "train": {"gbs": 0}}))
    said = _refusal(["tune", "--request", str(path)], capsys)
    assert "train.gbs is 0, must be a whole number of at least 1." in said
    path.write_text(json.dumps({"requests": [_REQUEST]}))
    assert "must be one request" in _refusal(["tune", "--request", str(path)], capsys)
