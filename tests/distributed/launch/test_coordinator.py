"""Two nodes on localhost: a coordinator and an agent, each a real process, meet through the store."""

import socket
import subprocess
import sys
import textwrap

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch.coordinator import check_port_is_free, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.torch]

COORDINATOR = """
    import json, sys
    from pathlib import Path
    from mindspeed_autoparallel.runtime.launch import Coordinator, LaunchSpec
    port, work, join_timeout = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    with Coordinator(num_nodes=2, num_processes_per_node=2, master_addr="localhost", master_port=port,
                     log_dir=work / "logs", join_timeout_s=join_timeout) as coordinator:
        for number, script in enumerate(("good.py", "bad.py", "good.py")):
            spec = LaunchSpec(launch_id=f"launch{number}", argv=(str(work / script),), timeout_s=60)
            print(json.dumps(coordinator.launch(spec).to_json()), flush=True)
"""
AGENT = """
    import sys
    from pathlib import Path
    from mindspeed_autoparallel.runtime.launch import run_agent
    print(run_agent(node_rank=1, num_nodes=2, num_processes_per_node=2, master_addr="localhost",
                    master_port=int(sys.argv[1]), log_dir=Path(sys.argv[2]) / "logs1", join_timeout_s=30))
"""
GOOD = "import os, pathlib, sys\npathlib.Path(sys.path[0], 'ran' + os.environ['RANK'] + '-' + os.environ['WORLD_SIZE']).touch()\n"
BAD = (
    "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit('rank 3 on the other node broke')\ntime.sleep(300)\n"
)


def start(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_nodes_run_every_launch_and_a_failure_on_one_ends_it_on_both(tmp_path):
    import json

    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    port = free_port()
    agent = start(AGENT, port, tmp_path)
    coordinator = start(COORDINATOR, port, tmp_path, 60)
    out, error = coordinator.communicate(timeout=180)
    outcomes = [json.loads(line) for line in out.splitlines()]
    assert [outcome["status"] for outcome in outcomes] == ["ok", "failed", "ok"], error
    assert outcomes[1]["node_rank"] == 1
    assert any("rank 3 on the other node broke" in line for line in outcomes[1]["last_lines"])
    assert sorted(path.name for path in tmp_path.glob("ran*")) == [f"ran{rank}-4" for rank in range(4)]
    assert agent.communicate(timeout=60)[0].strip() == "3"


def test_a_node_that_does_not_come_is_named_with_what_to_do(tmp_path):
    coordinator = start(COORDINATOR, free_port(), tmp_path, 1)
    _, error = coordinator.communicate(timeout=60)
    assert "node 1 of 2 did not come" in error
    assert "--node-rank 1" in error


def test_an_agent_without_main_node_says_so(tmp_path):
    code = AGENT.replace("join_timeout_s=30", "join_timeout_s=1")
    _, error = start(code, free_port(), tmp_path).communicate(timeout=60)
    assert "cannot reach the main node" in error


def test_a_master_port_in_use_is_an_error_before_anything_starts():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--master-port {port} cannot be used"):
            check_port_is_free(port)
