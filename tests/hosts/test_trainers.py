"""Plans of ``plan --fsdp2`` in the FSDP2 trainers of other projects: their shipped files with small sizes, on CPU (docs/hosts.md)."""

from __future__ import annotations

import re
import shlex

import pytest
from trainer_cells import HOSTS, train, write_config, write_model

from mindspeed_autoparallel.cli.main import main

pytestmark = [pytest.mark.torch, pytest.mark.distributed, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a function: the trainer, its file, and the steps by the file that it ships, made once."""
    found = {}

    def get(name):
        host = HOSTS[name]
        if host.missing:
            pytest.skip(f"set {', '.join(host.missing)} (tests/hosts/README.md)")
        if name not in found:
            folder = tmp_path_factory.mktemp(name.replace(" ", ""))
            write_model(host, folder)
            world = 1 if host.starts_alone else 2
            found[name] = host, folder, train(host, world, write_config(host, folder, world))
        return found[name]

    return get


def planned(host, config, nodes, devices, capsys, *more):
    """Return the written file, words for the command line, and the peaks of the rows below the plan in MiB."""
    folder = config.parent / "planned"
    command = [
        "plan",
        "--fsdp2",
        str(config),
        "--model",
        str(config.parent / "model" / "config.json"),
        *host.plan_words,
    ]
    command += ["--device", "H100", "--nnodes", str(nodes), "--nproc-per-node", str(devices), "--out", str(folder)]
    assert main([*command, *more]) == 0
    said = capsys.readouterr()
    written = config.with_name("planned.yaml")
    written.write_bytes((folder / config.name).read_bytes())
    words = re.findall(r"^add to the command line: (.*)$", said.err, re.M)
    peaks = re.findall(r"^(?:shipped|without).* peak (\S+) MiB", said.out, re.M)
    return written, [one for line in words for one in shlex.split(line)], [float(text) for text in peaks]


def close(steps, expected):
    flat = [value for step in steps for value in step]
    assert len(flat) == 6 and flat == pytest.approx([value for step in expected for value in step], rel=1e-6)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (2, 2)], ids=["2 devices", "2 nodes of 2"])
@pytest.mark.parametrize("name", HOSTS)
def test_the_written_file_trains_as_the_shipped_one(prepared, capsys, name, nodes, devices):
    host, folder, expected = prepared(name)
    config = write_config(host, folder, nodes * devices)
    shipped = config.read_bytes()
    written, words, _ = planned(host, config, nodes, devices, capsys)
    assert config.read_bytes() == shipped and (words or written.read_bytes() != shipped)
    close(train(host, nodes * devices, written, *words), expected)
