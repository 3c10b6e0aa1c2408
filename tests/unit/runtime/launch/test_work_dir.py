"""The folder of a tuning run: private, its own, and named where it cannot be used."""

import errno
import tempfile
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("names", [None, [], ["logs"], [".lock", "traces"]])
def test_a_new_an_empty_and_an_earlier_work_dir_are_made_private(tmp_path, names):
    folder = tmp_path / "deep" / "work"
    if names is not None:
        folder.mkdir(parents=True, mode=0o755)
        for name in names:
            (folder / name).touch()
    assert private_work_dir(str(folder), "--auto-tuning-work-dir") == folder
    assert mode(folder) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted(names or [])


def test_a_folder_that_others_use_is_not_closed_to_them(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="can be read by others and holds other files"):
        private_work_dir(str(tmp_path), "--auto-tuning-work-dir")
    assert mode(tmp_path) == 0o755


def test_ones_own_private_folder_may_hold_other_things(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").touch()
    assert private_work_dir(str(tmp_path), "--auto-tuning-work-dir") == tmp_path


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "work").touch()
    with pytest.raises(ConfigError, match="work is a file; name a folder"):
        private_work_dir(str(tmp_path / "work"), "--auto-tuning-work-dir")
    with pytest.raises(ConfigError, match=r"cannot write to the work dir .*Not a directory"):
        private_work_dir(str(tmp_path / "work" / "below"), "--auto-tuning-work-dir")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, number):
    def refuse(**_):
        raise OSError(number, "refused by the test")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"cannot write to the work dir .*refused by the test"):
        private_work_dir(str(tmp_path / "work"), "--auto-tuning-work-dir")


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"cannot write to the work dir|is a file"):
        private_work_dir(str(tmp_path / "loop"), "--auto-tuning-work-dir")


def test_nodes_that_share_it_may_look_at_once(tmp_path):
    """Every look takes a name of its own."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(private_work_dir, [str(tmp_path / "work")] * 64, ["--work-dir"] * 64))
    assert set(found) == {Path(tmp_path / "work")}


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        private_work_dir(str(tmp_path), "--work-dir")


def test_a_name_with_a_nul_is_one_line():
    with pytest.raises(ConfigError, match=r"cannot write to the work dir a\?b"):
        private_work_dir("a\0b", "--work-dir")
