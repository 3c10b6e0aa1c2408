"""The operator knowledge base."""

import json
import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator, Sample, Signature
from mindspeed_autoparallel.profiles.knowledge.base import export_knowledge, import_knowledge
from mindspeed_autoparallel.profiles.knowledge.estimate import coverage, estimate
from mindspeed_autoparallel.profiles.knowledge.signature import Call, Link, OfModel, TensorArgument


def _mm(rows: int, inner: int, columns: int) -> Operator:
    return Operator(name="aten.mm.default", signature=Signature.of_json("bf16"), sizes=(rows, inner, inner, columns))


def _sample(median: float, runs: int = 10) -> Sample:
    return Sample(median_us=median, p10_us=median * 0.9, p90_us=median * 1.1, num_runs=runs, source="test")


def _write(path: Path, worker: int) -> None:
    base = KnowledgeBase(path)
    for index in range(20):
        base.record("dev", "soft", [(_mm(worker + 1, index + 1, 8), _sample(1.0 + index))])


def test_recorded_samples_are_found_again_only_under_their_fingerprints(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    base.record("dev", "soft", [(_mm(8, 8, 8), _sample(5.0))])
    found = KnowledgeBase(tmp_path / "base.sqlite").find("dev", "soft", _mm(8, 8, 8))
    assert found is not None
    assert found.median_us == 5.0
    assert found.measured_at > 0
    assert base.find("other", "soft", _mm(8, 8, 8)) is None
    assert base.find("dev", "newer", _mm(8, 8, 8)) is None


def test_the_sample_with_more_runs_stays(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    base.record("dev", "soft", [(_mm(8, 8, 8), _sample(5.0, runs=50))])
    base.record("dev", "soft", [(_mm(8, 8, 8), _sample(9.0, runs=2))])
    found = base.find("dev", "soft", _mm(8, 8, 8))
    assert found is not None
    assert found.median_us == 5.0


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "base.sqlite"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write, args=(path, index)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert KnowledgeBase(path).fingerprints() == [("dev", "soft", 60)]


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "base.sqlite"
    path.write_text("not a database, but long enough to be read as one " * 30)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="cannot be used"):
        KnowledgeBase(path)
    assert path.read_bytes() == before


def test_a_newer_base_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "base.sqlite"
    KnowledgeBase(path)
    with sqlite3.connect(path) as connection:
        connection.execute("update about set schema_version = 7")
    connection.close()
    with pytest.raises(ProfileError, match="schema version 7, this release reads 1"):
        KnowledgeBase(path)


def test_impossible_times_are_refused(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    with pytest.raises(ProfileError, match="p10"):
        base.record("d", "s", [(_mm(1, 1, 1), Sample(median_us=1, p10_us=2, p90_us=3, num_runs=1, source="t"))])
    assert base.fingerprints() == []


def test_between_measured_sizes_the_time_lies_between_theirs_with_an_error_bar(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    base.record("d", "s", [(_mm(256, 512, 512), _sample(10.0)), (_mm(1024, 512, 512), _sample(40.0))])
    between = estimate(base, "d", "s", _mm(512, 512, 512))
    assert between is not None
    assert not between.exact
    assert 10 < between.time_us < 40
    assert between.relative_error > 0
    exact = estimate(base, "d", "s", _mm(256, 512, 512))
    assert exact is not None
    assert exact.exact


def test_far_sizes_and_other_signatures_are_not_guessed(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    base.record("d", "s", [(_mm(256, 512, 512), _sample(10.0))])
    assert estimate(base, "d", "s", _mm(256 * 64, 512, 512)) is None
    assert (
        estimate(
            base,
            "d",
            "s",
            Operator(name="aten.mm.default", signature=Signature.of_json("fp32"), sizes=(256, 512, 512, 512)),
        )
        is None
    )


def test_coverage_counts_time_not_operators(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "base.sqlite")
    base.record("d", "s", [(_mm(256, 512, 512), _sample(1000.0)), (_mm(8, 8, 8), _sample(1.0))])
    near = _mm(8, 8, 16)
    result = coverage(base, "d", "s", {_mm(256, 512, 512): 1, near: 1})
    assert result.covered_time_share > 0.99
    assert result.missing == (near,)


def test_export_and_import_carry_everything(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "a.sqlite")
    base.record("d", "s", [(_mm(4, 5, 6), _sample(3.0))])
    assert export_knowledge(base, tmp_path / "all.json") == 1
    copy = KnowledgeBase(tmp_path / "b.sqlite")
    assert import_knowledge(copy, tmp_path / "all.json") == 1
    assert copy.entries() == base.entries()


def test_an_export_holds_no_json_as_text_and_is_read_back(tmp_path: Path) -> None:
    text = '[[{"dtype":"bfloat16","order":[1,0]},{"size":1},[1,true,1.0,-Infinity]],{"map":{"to":{"constant":"cpu"}}}]'
    call = Operator(name="aten.fill", signature=Signature.of_json(text), sizes=(4, 5, 4096))
    assert call.signature.text == text  # as the column has it
    assert isinstance(call.signature.content, Call) and call.signature.content.args[0] == TensorArgument(
        "bfloat16", (1, 0)
    )
    link = Operator(name="collective.p2p", signature=Signature(Link("intra", 2)), sizes=(8,))
    figures = [
        Operator(name="host.scale", signature=Signature(OfModel("12e4", layout)), sizes=()) for layout in (None, "TP2")
    ]
    base = KnowledgeBase(tmp_path / "a.sqlite")
    base.record("d", "s", [(operator, _sample(3.0)) for operator in (call, link, *figures)])
    export_knowledge(base, tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    kept = {sample["name"]: sample["signature"] for sample in document["samples"]}
    assert kept["aten.fill"][0] == [
        {"dtype": "bfloat16", "order": [1, 0]},
        {"size": 1},
        [1, True, 1.0, {"number": "-inf"}],
    ]
    copy = KnowledgeBase(tmp_path / "all.sqlite")
    import_knowledge(copy, tmp_path / "all.json")
    assert copy.entries() == base.entries()


@pytest.mark.parametrize("signature", ["[1, 2", [1, 2, 3], {"tier": "intra"}, 7, [["x"], ["y"]], [["x"], {"map": 0.5}]])
def test_an_invalid_signature_is_named_in_a_line(tmp_path: Path, signature: object) -> None:
    entry = {"device": "d", "software": "s", "name": "aten.mm", "signature": signature, "sizes": []}
    (tmp_path / "all.json").write_text(json.dumps({"schema_version": 2, "samples": [entry]}))
    with pytest.raises(ProfileError, match=r"sample 0 is broken: .* is not a signature of an operator"):
        import_knowledge(KnowledgeBase(tmp_path / "a.sqlite"), tmp_path / "all.json")


def test_numbers_that_python_takes_for_equal_make_three_signatures() -> None:
    assert len({Signature.of_json(f'[[{number}],{{"map":{{}}}}]') for number in ("1", "1.0", "true")}) == 3


def test_a_broken_export_stores_nothing(tmp_path: Path) -> None:
    base = KnowledgeBase(tmp_path / "a.sqlite")
    base.record("d", "s", [(_mm(4, 5, 6), _sample(3.0))])
    export_knowledge(base, tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    document["samples"].append({"device": "d", "software": "s"})
    (tmp_path / "all.json").write_text(json.dumps(document))
    copy = KnowledgeBase(tmp_path / "b.sqlite")
    with pytest.raises(ProfileError, match="sample 1 is broken"):
        import_knowledge(copy, tmp_path / "all.json")
    assert copy.entries() == []
    document["schema_version"] = 9
    (tmp_path / "all.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="schema_version 9"):
        import_knowledge(copy, tmp_path / "all.json")


def test_command_shows_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sqlite"
    assert main(["knowledge", "show", str(path)]) == 2
    KnowledgeBase(path).record("d", "s", [(_mm(4, 5, 6), _sample(3.0))])
    capsys.readouterr()
    assert main(["knowledge", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"fingerprints": [{"device": "d", "software": "s", "samples": 1}]}


def test_a_slow_writer_blocks_no_reader_and_is_named_to_other_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_autoparallel.profiles.knowledge.base.PATIENCE_S", 0.1)
    path = tmp_path / "base.sqlite"
    KnowledgeBase(path).record("dev", "soft", [(_mm(8, 8, 8), _sample(5.0))])
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("begin immediate")
    try:
        base = KnowledgeBase(path)
        assert base.find("dev", "soft", _mm(8, 8, 8)) is not None
        with pytest.raises(ProfileError, match=r"locked\. Another process has been writing to it"):
            base.record("dev", "soft", [(_mm(8, 8, 9), _sample(5.0))])
    finally:
        writer.close()
    base.record("dev", "soft", [(_mm(8, 8, 9), _sample(5.0))])
    assert len(base.entries()) == 2


def test_a_full_disk_is_reported_and_loses_no_stored_sample(tmp_path: Path) -> None:
    path = tmp_path / "base.sqlite"
    base = KnowledgeBase(path)
    base.record("dev", "soft", [(_mm(8, 8, 8), _sample(5.0))])
    with sqlite3.connect(path) as connection:
        pages = connection.execute("pragma page_count").fetchone()[0]
    connection.close()
    connect = sqlite3.connect

    def small(*args: object, **kwargs: object) -> sqlite3.Connection:
        found = connect(*args, **kwargs)  # type: ignore[call-overload]
        found.execute(f"pragma max_page_count={pages}")
        return found  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", small)
        with pytest.raises(ProfileError, match=r"full\. Free space there"):
            base.record("dev", "soft", [(_mm(8, 8, size), _sample(5.0)) for size in range(1, 3000)])
    assert [entry[2] for entry in base.entries()] == [_mm(8, 8, 8)]


def test_a_base_that_breaks_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "base.sqlite"
    base = KnowledgeBase(path)
    base.record("dev", "soft", [(_mm(8, 8, size), _sample(5.0)) for size in range(1, 3000)])
    with sqlite3.connect(path) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    content = bytearray(path.read_bytes())
    content[8192:-8192] = b"\xff" * (len(content) - 16384)
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"malformed\. Move it away"):
        base.entries()


@pytest.mark.parametrize("name", ["folder", "file/base.sqlite"])
def test_a_place_where_no_file_can_be_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ProfileError, match=f"knowledge base {tmp_path / name} cannot be used"):
        KnowledgeBase(tmp_path / name)


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table customers (name text)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="another kind of database"):
        KnowledgeBase(path)
    assert path.read_bytes() == before
