"""Which Megatron is on the path, and what is wrong with it, named before anything is imported."""

import subprocess

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron.installation import check_installation, find_installation

FLAGS = ["--auto-tuning"]
PARTS = {
    "core": ("parallel_state", "pipeline_parallel/schedules", "transformer/transformer_config"),
    "training": ("arguments", "checkpointing", "global_vars", "initialize", "training"),
}


def megatron(folder, release, *, training=True, core=True):
    """A folder with the packages of a Megatron of ``release``; megatron itself is a namespace, as upstream."""
    for name, wanted in (("core", core), ("training", training)):
        if wanted:
            package = folder / "megatron" / name
            package.mkdir(parents=True)
            for part in ("__init__", *PARTS[name]):
                file = package / f"{part}.py"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("")
    if core:
        major, minor, patch = release.split(".")
        (folder / "megatron" / "core" / "package_info.py").write_text(
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
        )
    return str(folder)


@pytest.mark.parametrize("release", ["0.12.1", "0.19.2", "0.20.0"])
def test_a_complete_supported_release_is_taken_without_a_word(tmp_path, release):
    found = find_installation(["", megatron(tmp_path, release)])
    assert (found.release, check_installation(found, FLAGS)) == (release, "")


@pytest.mark.parametrize("release", ["0.8.0", "0.11.0", "0.21.0"])
def test_another_release_is_refused_by_name(tmp_path, release):
    with pytest.raises(ConfigError, match=rf"--auto-tuning needs megatron-core 0.12 to 0.20; .* has {release}"):
        check_installation(find_installation([megatron(tmp_path, release)]), FLAGS)


def test_a_core_without_training_is_half_a_host(tmp_path):
    with pytest.raises(ConfigError, match=r"megatron\.training, which is not installed"):
        check_installation(find_installation([megatron(tmp_path, "0.16.1", training=False)]), FLAGS)


@pytest.mark.parametrize("part", ["core/pipeline_parallel/schedules", "training/arguments"])
def test_a_checkout_without_some_of_its_files_is_half_a_host(tmp_path, part):
    """Python called it a circular import, in the script's own line."""
    path = megatron(tmp_path, "0.16.1")
    (tmp_path / "megatron" / f"{part}.py").unlink()
    with pytest.raises(ConfigError, match=rf"megatron-core 0.16.1 in {tmp_path} is incomplete: megatron/{part} is"):
        check_installation(find_installation([path]), FLAGS)


def test_core_and_training_of_two_hosts_are_refused(tmp_path):
    first = megatron(tmp_path / "first", "0.12.1", training=False)
    second = megatron(tmp_path / "second", "0.19.2")
    with pytest.raises(ConfigError, match=r"two Megatrons on one path: .*first, megatron.training from .*second"):
        check_installation(find_installation([first, second]), FLAGS)


def test_a_second_complete_host_is_named_once_and_not_used(tmp_path):
    first = megatron(tmp_path / "first", "0.12.1")
    second = megatron(tmp_path / "second", "0.19.2")
    remark = check_installation(find_installation([first, second, second]), FLAGS)
    assert remark == f"using megatron-core 0.12.1 in {first}; also on the path, and not used: 0.19.2 in {second}"


def run(script, *arguments, path):
    return subprocess.run(
        [forked_python(), str(script), *arguments],
        env={"PYTHONPATH": path, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_scripts_end_with_one_line_and_run_on_without_our_flags(tmp_path):
    import mindspeed_autoparallel

    root = str(tmp_path / "host")
    path = ":".join([megatron(tmp_path / "host", "0.8.0"), *mindspeed_autoparallel.__path__[0].rsplit("/", 1)[:1]])
    first = tmp_path / "first.py"
    first.write_text("import mindspeed_autoparallel\nimport megatron.core\nprint('trains')\n")
    refused = run(first, "--auto-parallel-mm", path=path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        f"ConfigError: --auto-parallel-mm needs megatron-core 0.12 to 0.20; {root} has 0.8"
    )
    assert len(refused.stderr.splitlines()) == 1
    late = tmp_path / "late.py"
    late.write_text(
        "import sys, types\nsys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "sys.modules['megatron.training.arguments'] = types.ModuleType('megatron.training.arguments')\n"
        "import mindspeed_autoparallel\nprint('trains')\n"
    )
    refused = run(late, "--auto-tuning", path=path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        "megatron.training.arguments was imported first. Move `import mindspeed_autoparallel` above" in refused.stderr
    )
