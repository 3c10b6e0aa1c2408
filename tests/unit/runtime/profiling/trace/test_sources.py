"""A stored trace is stale once any code that it ran through has changed."""

from pathlib import Path

import pytest

from mindspeed_autoparallel.runtime.profiling.trace import process


@pytest.mark.parametrize(
    "name",
    [
        "profiling/trace/fake_tensors.py",
        "attention/context_parallel.py",
        "devices/cpu/adapter.py",
        "profiling/trace/worker.py",
        "profiling/measure/point.py",
        "megatron/hybrid.py",
        "../patching/engine.py",
        "../profiles/knowledge/signature.py",
    ],
)
def test_a_changed_file_changes_both_hashes(name, tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("pass")
    changed = (Path(process.__file__).parents[2] / name).resolve()
    assert changed.is_file()

    def hashes():
        return {process.hash_of_tracing_code().hexdigest(), process.hash_of_sources(script).hexdigest()}

    before, read = hashes(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path == changed else b""))
    assert not before & hashes()


def test_a_changed_file_beside_the_script_changes_its_hash(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    before = process.hash_of_sources(script).hexdigest()
    (tmp_path / "layers.py").write_text("pass")
    assert process.hash_of_sources(script).hexdigest() != before
