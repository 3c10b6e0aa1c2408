"""The picture that zooms: every operator is in the tree once, nothing overlaps, and what is drawn stays small."""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

from mindspeed_autoparallel.operators import preset_graph
from mindspeed_autoparallel.operators.picture import tree_data
from mindspeed_autoparallel.operators.pipeline import data_parallel

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script")
SCRIPT = files("mindspeed_autoparallel.report") / "static" / "operator_tree.js"
CHECK = """
const t = require(process.argv[1]);
const plan = JSON.parse(require("fs").readFileSync(0, "utf8"));
const started = process.hrtime.bigint();
const { root, leaves } = t.buildTree(plan);
const all = new Set(), collect = n => { if (n.op < 0) { all.add(n); n.children.forEach(collect); } };
collect(root);
function overlaps(node) {
  if (node.op >= 0 || !all.has(node)) return 0;
  let bad = 0;
  const kids = node.children.slice().sort((a, b) => a.y - b.y);
  kids.forEach((a, i) => {
    if (a.x < 0 || a.y < 0 || a.x + a.width > node.width + 1e-6 || a.y + a.height > node.height + 1e-6) bad++;
    for (let j = i + 1; j < kids.length && kids[j].y < a.y + a.height; j++) {
      if (a.x < kids[j].x + kids[j].width && kids[j].x < a.x + a.width) bad++;
    }
    bad += overlaps(a);
  });
  return bad;
}
const links = n => n.links.length + n.children.reduce((s, c) => s + links(c), 0);
const sum = n => n.op >= 0 ? n.forward + n.backward : n.children.reduce((s, c) => s + sum(c), 0);
const seen = (open, view, least) => { let n = 0; t.visit(root, open, view, least, () => n++); return n; };
const first = t.openAtFirst(root, 60);
t.place(root, first);
const everywhere = { left: 0, top: 0, right: 1e9, bottom: 1e9 };
const atFirst = seen(first, everywhere, 0);
t.place(root, all);
const ms = Number(process.hrtime.bigint() - started) / 1e6;
const scale = 600 / root.height;
const corner = t.cornerOf(leaves[leaves.length - 1]);
const hit = t.nodeAt(root, all, corner.x + 5, corner.y + 5, 0);
console.log(JSON.stringify({
  leaves: leaves.length, count: root.count, overlaps: overlaps(root), atFirst, ms, links: links(root), sent: sum(root),
  whole: seen(all, everywhere, 60 / scale),
  near: seen(all, { left: corner.x - 600, top: corner.y - 300, right: corner.x + 600, bottom: corner.y + 300 }, 60),
  hit: hit && hit.node.path, widest: Math.max(...[...all].map(n => n.children.length)),
}));
"""


def look(data):
    done = subprocess.run(["node", "-e", CHECK, str(SCRIPT)], input=json.dumps(data), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plan_of(layers):
    return data_parallel(preset_graph("llama2-7b", batch=8, sequence=64, num_layers=layers), 4)


def test_ten_thousand_operators_are_in_it_once_and_few_are_drawn_at_a_time():
    plan = plan_of(770)
    data = tree_data(plan)
    found = look(data)
    assert found["leaves"] == found["count"] == len(data["names"]) > 10_000
    assert found["overlaps"] == 0
    assert found["sent"] == sum(map(sum, plan.edge_bytes().values()))
    assert found["atFirst"] <= 80 and found["whole"] < 200 and found["near"] < 200
    assert found["hit"] == data["names"][-1]
    assert found["widest"] <= 150


def test_operators_without_modules_are_divided_into_runs():
    number = 10_000
    flat = {
        "names": [f"op{i}" for i in range(number)], "kind": [0] * number, "shape": [0] * number, "cuts": [0] * number,
        "forward": [0] * number, "backward": [1] * number, "axes": ["rows"], "cutsets": [[0]], "kinds": ["x"],
        "shapes": ["1"], "edges": [value for i in range(number - 1) for value in (i, i + 1, 2, 3)],
    }  # fmt: skip
    found = look(flat)
    assert found["count"] == found["leaves"] == number and found["sent"] == number
    assert found["overlaps"] == 0 and found["widest"] <= 150 and found["whole"] < 300
    assert found["links"] == number - 1
