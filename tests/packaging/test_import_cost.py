"""What ``import mindspeed_autoparallel`` loads, and that the package can be used from every kind of installation."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)


def test_import_loads_no_heavy_package():
    code = (
        "import sys, json, mindspeed_autoparallel\n"
        "heavy = ('torch', 'ortools', 'numpy', 'pandas', 'megatron', 'asyncio', 'wrapt')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    assert json.loads(run(code).stdout) == []


def test_planning_rooms_import_without_torch_and_megatron():
    code = (
        "import sys, importlib, pkgutil\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'megatron', 'torch_npu', 'mindspeed'):\n"
        "            raise ImportError('refused ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import mindspeed_autoparallel as package\n"
        "for room in ('spec', 'profiles', 'cost', 'schedule', 'planner', 'report', 'predict', 'cli'):\n"
        "    module = importlib.import_module(f'mindspeed_autoparallel.{room}')\n"
        "    for item in pkgutil.walk_packages(module.__path__, module.__name__ + '.'):\n"
        "        importlib.import_module(item.name)\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_top_level_patches_package_names_the_right_import():
    result = run("import patches", cwd=ROOT)
    assert "import mindspeed_autoparallel.patches instead" in result.stderr
