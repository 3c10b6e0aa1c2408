"""Reads logs of Megatron, MindSpeed-LLM and MindSpeed-MM: arguments, step times, peaks of memory.

A log begins with its arguments (``------ arguments ------``), printed by rank 0; a line per logged step has ``elapsed
time per iteration (ms)``; every first rank of a data-parallel group reports its memory once. Restarts, crashes, several
ranks in one file and compressed files are handled: usable steps count, and ``remarks`` list the others.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import re
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import MAX_INPUT_BYTES, read_bytes

_GZIP = b"\x1f\x8b"
_ARGUMENTS = re.compile(r"-{8,} arguments -{8,}")
_END = re.compile(r"-{8,} end of arguments -{8,}")
_ARGUMENT = re.compile(r"^(?:\S*\[\S*\]:?\s*)*\s*(\w+) \.{2,} ?(.*)$")
_DOTLESS = re.compile(r"^(?:\S*\[\S*\]:?\s*)*\s{2}(\w{47,}) \.* ?(.*)$")
_STEP = re.compile(r"iteration:?\s+(\d{1,15})\s*(?:/\s*(\d+))?\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\):\s*(\d{1,15}(?:\.\d*)?)(?![\d.])")
_BATCH = re.compile(r"global batch size:\s*(\d{1,15})(?!\d)")
_MEMORY = re.compile(r"\[Rank (\d{1,15})\].*memory \(MB\).*?max allocated:\s*(\d{1,15}(?:\.\d*)?)(?![\d.])")
_CRASH = re.compile(
    r"^(?:\S*\[\S*\]:?\s*)*(Traceback \(most recent call last\)|.*(?:Error|Exception): |.*Segmentation fault)"
)
_LEAST_STEPS = 3
_WARM_UP = 2
"""Steps at the start of each run that are left out: compiling, allocating, first reads of data."""
_APART = 1.25
"""Two times of one step, or two groups of steps, this factor apart are of different runs."""
_LEAST_SHARE = 0.25
"""Of the steps that the smaller of two groups has."""
_SLOW = 2.0
"""Steps slower than this many medians are left out: checkpoints, evaluations, stalls."""


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """One run by its log."""

    name: str
    digest: str
    """First digits of the content's SHA-256."""
    arguments: dict[str, str]
    global_batch: int
    step_ms: float
    """Median of the steps that count."""
    spread: float
    """Relative standard deviation of that median, by the steps' own scatter."""
    num_steps: int
    peak_gib: dict[int, float]
    """Most allocated by rank, where it was reported."""
    remarks: tuple[str, ...]


@dataclass
class _Segment:
    """What lies between one start of the program and the next."""

    arguments: dict[str, str]
    steps: dict[int, list[tuple[float, int]]]
    peaks: dict[int, float]
    crashed: bool = False


def read_log(path: Path) -> TrainingLog:
    """Return the last run in ``path`` with enough steps. Raises ``ConfigError`` with the missing part: arguments,
    steps, or both.
    """
    content = _content(path)
    segments = list(_segments(content.splitlines()))
    if not any(segment.arguments for segment in segments):
        what = (
            "has steps but no arguments" if any(segment.steps for segment in segments) else "is not a log of Megatron"
        )
        raise ConfigError(f"{path} {what}: the block '--- arguments ---' of rank 0 is missing; the log is ignored.")
    usable = [segment for segment in segments if segment.arguments and len(segment.steps) >= _LEAST_STEPS + _WARM_UP]
    if not usable:
        most = max(len(segment.steps) for segment in segments)
        raise ConfigError(
            f"{path} has {most} steps in its longest run; {_LEAST_STEPS + _WARM_UP} are needed, "
            f"because the first {_WARM_UP} are skipped. Log every step (--log-interval 1)."
        )
    return _summary(path, content, usable[-1], len(segments))


def _content(path: Path) -> str:
    raw = read_bytes(path, "training log")
    if raw.startswith(_GZIP):
        try:
            inflate = zlib.decompressobj(wbits=31)
            raw = inflate.decompress(raw, MAX_INPUT_BYTES)
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path} is a broken gzip file: {error}.") from error
        if inflate.unconsumed_tail:
            raise ConfigError(f"{path} is larger than {MAX_INPUT_BYTES >> 20} MiB unpacked; cut it to some steps.")
    return raw.decode("utf-8", errors="replace")


def _segments(lines: list[str]) -> Iterator[_Segment]:
    """Split a log where arguments are printed anew, or where step numbers fall back."""
    current = _Segment({}, {}, {})
    reading = False
    for line in lines:
        if _END.search(line):
            reading = False
        elif _ARGUMENTS.search(line):
            if current.arguments or current.steps:
                yield current
                current = _Segment({}, {}, {})
            reading = True
        elif reading:
            found = _ARGUMENT.match(line) or _DOTLESS.match(line)
            if found:
                current.arguments[found.group(1)] = found.group(2).strip()
        else:
            step, elapsed = _STEP.search(line), _ELAPSED.search(line)
            if step and elapsed:
                number = int(step.group(1))
                if current.steps and number < max(current.steps) - 1:
                    yield current
                    current = _Segment(dict(current.arguments), {}, dict(current.peaks))
                batch = _BATCH.search(line)
                current.steps.setdefault(number, []).append(
                    (float(elapsed.group(1)), int(batch.group(1)) if batch else 0)
                )
            elif memory := _MEMORY.search(line):
                rank, peak = int(memory.group(1)), float(memory.group(2)) / 1024
                current.peaks[rank] = max(peak, current.peaks.get(rank, 0.0))
            elif _CRASH.match(line):
                current.crashed = True
    yield current


def _whole(text: str) -> int:
    """Return the whole number in ``text``; 0 where there is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0


def _refuse_mixed(path: Path, segment: _Segment, numbers: list[int]) -> None:
    """Raise ``ConfigError`` if the steps belong to two runs: a step has two times, or times fall into two groups."""
    twice = [[time for time, _ in segment.steps[number]] for number in numbers if len(segment.steps[number]) > 1]
    differing = [times for times in twice if max(times) > _APART * min(times)]
    if 2 * len(differing) > max(2, len(twice)):
        raise ConfigError(
            f"{path}: {len(differing)} steps were written twice with different times, as {min(differing[0]):.4g} and "
            f"{max(differing[0]):.4g} ms: two runs wrote to it; the log is ignored."
        )
    times = sorted(statistics.median(time for time, _ in segment.steps[number]) for number in numbers)
    gaps = [after / before for before, after in itertools.pairwise(times) if before > 0]
    if not gaps or max(gaps) < _APART:
        return
    cut = gaps.index(max(gaps)) + 1
    if min(cut, len(times) - cut) >= max(2, _LEAST_SHARE * len(times)):
        raise ConfigError(
            f"{path}: {cut} steps take about {statistics.median(times[:cut]):.4g} ms and {len(times) - cut} about "
            f"{statistics.median(times[cut:]):.4g} ms: two runs, or a changed machine; the log is ignored. "
            "Cut it to one of them."
        )


def _summary(path: Path, content: str, segment: _Segment, num_segments: int) -> TrainingLog:
    remarks = []
    if num_segments > 1:
        remarks.append(f"{num_segments} starts in one file; the last with enough steps counts")
    if segment.crashed:
        remarks.append("it ended with an error; the steps before it count")
    if any(len(times) > 1 for times in segment.steps.values()):
        remarks.append("several ranks wrote steps; each step counts once")
    numbers = sorted(segment.steps)[_WARM_UP:]
    batch = segment.steps[numbers[-1]][0][1] or _whole(segment.arguments.get("global_batch_size", ""))
    steady = [number for number in numbers if segment.steps[number][0][1] in (batch, 0)]
    if len(steady) < len(numbers):
        remarks.append(f"{len(numbers) - len(steady)} steps with another global batch are left out")
    _refuse_mixed(path, segment, steady)
    times = [statistics.median(time for time, _ in segment.steps[number]) for number in steady]
    middle = statistics.median(times)
    kept = [time for time in times if 0 < time <= _SLOW * middle]
    if len(kept) < len(times):
        remarks.append(f"{len(times) - len(kept)} steps above {_SLOW:g} times the median are left out")
    step = statistics.median(kept)
    scatter = statistics.median(abs(time - step) for time in kept) * 1.4826
    return TrainingLog(
        name=path.name,
        digest=hashlib.sha256(content.encode()).hexdigest()[:12],
        arguments=segment.arguments,
        global_batch=batch,
        step_ms=step,
        spread=1.2533 * scatter / step / len(kept) ** 0.5,
        num_steps=len(kept),
        peak_gib=segment.peaks,
        remarks=tuple(remarks),
    )
