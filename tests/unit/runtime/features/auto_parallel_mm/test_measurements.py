"""Only measurements and real shortages of memory are kept; a failed launch leaves no result."""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.errors import LaunchError, ProfileError
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.measurements import Measurements
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

POINTS = tuple(
    MeasuredAt(tensor_size=tensor, context_size=1, expert_size=1, micro_batch_size=1, sequence_parallel=False)
    for tensor in (1, 2, 4)
)
GOOD = {
    "modules": [{"name": "text"}],
    "optimizer": {},
    "memory_capacity_bytes": 1,
    "host_bytes": 1,
    "links": {},
    "tied_embeddings": False,
}

HOST_SHORTAGE = "RuntimeError: DefaultCPUAllocator: can't allocate memory"


class Coordinator:
    """Plays launches: for every point in turn, ``act(point)`` says ok, out of memory, or how the process ends."""

    lost_nodes = ()

    def __init__(self, act: Callable[[MeasuredAt | None], str], folder: Path) -> None:
        self.act, self.log_dir = act, folder
        self.launches: list[list[str]] = []

    def launch(self, spec: LaunchSpec) -> LaunchOutcome:
        task = MeasureTask.from_json(json.loads(json.dumps(spec.task)))
        self.launches.append([point.label() for point in task.points])
        word = self.act(None)
        if word != "ok":
            return self.ended(word)
        for point in task.points:
            task.begun_file().write_text(json.dumps(point.label()))
            word = self.act(point)
            if word not in ("ok", "out_of_memory", "refused"):
                return self.ended(word)
            status = {"refused": "failed"}.get(word, word)
            more = GOOD if word == "ok" else {"reason": "said by the process"}
            task.result_file(point).write_text(json.dumps({"at": asdict(point), "status": status, **more}))
            if word != "ok":
                return self.ended(word)
        return LaunchOutcome(status=LaunchStatus.OK)

    def ended(self, word: str) -> LaunchOutcome:
        status = LaunchStatus.OUT_OF_MEMORY if word in ("out_of_memory", HOST_SHORTAGE) else LaunchStatus.FAILED
        return LaunchOutcome(status=status, exit_code=1, last_lines=("a line before", word))


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurements:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    description = types.SimpleNamespace(model_hash="m", model_file=None, modules=())
    request: Any = types.SimpleNamespace(
        sample_data=None,
        description=description,
        distributed_optimizer=False,
        num_measuring=1,
        num_played=0,
        work_dir=tmp_path,
        points=lambda: POINTS,
        launch_timeout_s=10.0,
    )
    return Measurements(request, {"device": "cpu"})


def statuses(found: dict[MeasuredAt, dict[str, Any]]) -> list[str]:
    return [found[point]["status"] for point in POINTS]


def test_a_wrong_start_is_not_reused_and_ends_after_one_launch(measurements: Measurements, tmp_path: Path):
    wrong = Coordinator(lambda point: "FileNotFoundError: data.json at line 7", tmp_path)
    with pytest.raises(ProfileError, match=r"before the first layout is measured; .*data\.json") as raised:
        measurements.measure(wrong)
    assert "\n" not in str(raised.value), "the launch's last lines are logged, and not printed a second time"
    assert len(wrong.launches) == 1
    assert measurements.kept() == {}
    assert statuses(measurements.measure(Coordinator(lambda point: "ok", tmp_path))) == ["ok"] * 3


def test_a_start_that_may_have_failed_by_chance_is_tried_again_with_another_point(
    measurements: Measurements, tmp_path: Path
):
    lost = Coordinator(lambda point: "RuntimeError: Connection reset by peer", tmp_path)
    with pytest.raises(ProfileError, match=r"before the first layout is measured, 2 times"):
        measurements.measure(lost)
    assert len(lost.launches) == 2
    assert lost.launches[0][0] != lost.launches[1][0]


def test_a_script_that_fails_in_its_first_microbatch_is_launched_twice_and_not_once_per_point(
    measurements: Measurements, tmp_path: Path
):
    """MindSpeed-MM asserts bf16 in the forward: every point was launched twice, a minute each."""
    error = "AssertionError: mrope only support bf16 now!"
    wrong = Coordinator(lambda point: "ok" if point is None else error, tmp_path)
    with pytest.raises(ProfileError, match=r"(?s)TP1.* and TP2.*, so no layout will work\..*mrope only support"):
        measurements.measure(wrong)
    assert [points[0][:3] for points in wrong.launches] == ["TP1", "TP2"]
    assert measurements.kept() == {}


def test_a_layout_at_which_the_script_fails_alike_for_two_microbatch_sizes_is_given_up(
    measurements: Measurements, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Otherwise every microbatch size of a layout that the script cannot run costs two launches."""
    points = tuple(replace(point, micro_batch_size=size) for point in POINTS[:2] for size in (1, 2, 4, 8))
    measurements._task = replace(measurements._task, points=points)
    error = "RuntimeError: shape '[2, 7]' is invalid for input of size 9"
    wrong = Coordinator(lambda point: error if point and point.tensor_size == 2 else "ok", tmp_path)
    found = measurements.measure(wrong)
    assert [found[point]["status"] for point in points] == ["ok"] * 4 + ["failed"] * 4
    assert [len(launch) for launch in wrong.launches] == [8, 4]
    assert wrong.launches[1][0].endswith("MBS2"), "another microbatch size tells the layout's fault from the point's"
    assert "4 of 8 points were not measured" in caplog.text


def test_a_killed_rank_costs_its_point_one_run_and_is_reported(
    measurements: Measurements, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    killed = Coordinator(lambda point: "Killed" if point == POINTS[1] else "ok", tmp_path)
    assert statuses(measurements.measure(killed)) == ["ok", "failed", "ok"]
    assert "1 of 3 points were not measured: TP2" in caplog.text
    assert [len(points) for points in killed.launches] == [3, 2]
    again = Coordinator(lambda point: "ok", tmp_path)
    with caplog.at_level(logging.INFO, logger="mindspeed_autoparallel"):
        assert statuses(measurements.measure(again)) == ["ok"] * 3
    assert "2 of 3 points were measured before" in caplog.text
    assert len(again.launches[0]) == 1


def test_a_process_that_dies_once_is_tried_again(measurements: Measurements, tmp_path: Path):
    deaths = iter(["Killed"])
    coordinator = Coordinator(lambda point: next(deaths, "ok") if point == POINTS[1] else "ok", tmp_path)
    assert statuses(measurements.measure(coordinator)) == ["ok"] * 3


def test_points_that_ran_out_of_memory_are_kept(measurements: Measurements, tmp_path: Path):
    full = Coordinator(lambda point: "out_of_memory" if point == POINTS[0] else "ok", tmp_path)
    assert statuses(measurements.measure(full)) == ["out_of_memory", "ok", "ok"]
    assert list(measurements.kept()) == list(POINTS)


def test_a_shortage_of_the_machines_memory_is_tried_again_and_never_kept(measurements: Measurements, tmp_path: Path):
    """Another program holds the memory at that moment: larger microbatches are still tried, now and in the next run."""
    points = tuple(replace(POINTS[0], micro_batch_size=size) for size in (1, 2, 4))
    measurements._task = replace(measurements._task, points=points)
    once = iter([HOST_SHORTAGE])
    short = Coordinator(lambda point: next(once, "ok") if point == points[0] else "ok", tmp_path)
    assert [found["status"] for found in measurements.measure(short).values()] == ["ok"] * 3
    for point in points:
        measurements._task.result_file(point).unlink()
    always = Coordinator(lambda point: HOST_SHORTAGE if point == points[1] else "ok", tmp_path)
    found = measurements.measure(always)
    assert [found[point]["status"] for point in points] == ["ok", "out_of_memory", "ok"]
    assert points[1] not in measurements.kept()


def test_a_full_disk_ends_the_search_and_is_named(measurements: Measurements, tmp_path: Path):
    full = "ConfigError: cannot write /work/measurements/1.json: No space left on device"
    coordinator = Coordinator(lambda point: full if point == POINTS[1] else "ok", tmp_path)
    with pytest.raises(LaunchError, match=r"No space left on device\. Free space there"):
        measurements.measure(coordinator)
    assert len(coordinator.launches) == 1
    assert list(measurements.kept()) == [POINTS[0]]


def test_points_that_the_process_refuses_are_retried_by_the_next_run(measurements: Measurements, tmp_path: Path):
    refused = Coordinator(lambda point: "refused" if point == POINTS[2] else "ok", tmp_path)
    assert statuses(measurements.measure(refused)) == ["ok", "ok", "failed"]
    assert POINTS[2] not in measurements.kept()
    assert statuses(measurements.measure(Coordinator(lambda point: "ok", tmp_path))) == ["ok"] * 3


@pytest.mark.parametrize("content", ["", "[]", '{"status": "ok"}', "{" * 9999, '{"at": 1, "status": 2}', "\x00"])
def test_a_damaged_file_counts_as_missing(measurements: Measurements, tmp_path: Path, content: str):
    measurements.measure(Coordinator(lambda point: "ok", tmp_path))
    measurements._task.result_file(POINTS[1]).write_text(content)
    again = Coordinator(lambda point: "ok", tmp_path)
    assert statuses(measurements.measure(again)) == ["ok"] * 3
    assert again.launches == [[POINTS[1].label()]]
