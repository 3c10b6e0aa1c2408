"use strict";
// The operators of a plan as a tree of modules with levels of detail: pure functions, no page needed.
const BOX = { width: 210, height: 46, gapX: 24, gapY: 34, pad: 14, head: 24, across: 6 };
const LARGEST_FLAT = 150;

// Returns the root of the module tree of `plan`: modules with children, operators as leaves; both in program order.
function buildTree(plan) {
  const root = { label: "model", path: "", parent: null, children: [], modules: new Map(), op: -1 };
  const leaves = plan.names.map((name, op) => {
    const parts = name.split(".");
    let at = root;
    for (const part of parts.slice(0, -1)) {
      if (!at.modules.has(part)) {
        const path = at.path ? at.path + "." + part : part;
        const made = { label: part, path, parent: at, children: [], modules: new Map(), op: -1 };
        at.modules.set(part, made);
        at.children.push(made);
      }
      at = at.modules.get(part);
    }
    const leaf = { label: parts[parts.length - 1], path: name, parent: at, children: [], op };
    at.children.push(leaf);
    return leaf;
  });
  divideFlat(root);
  sumUp(root, plan);
  linkSiblings(plan, leaves);
  return { root, leaves };
}

// Puts runs of very many operators of one module under nodes of their own, so that no level is too long to read.
function divideFlat(node) {
  node.children.forEach(divideFlat);
  if (node.children.length <= LARGEST_FLAT) return;
  const size = Math.ceil(Math.sqrt(node.children.length)), runs = [];
  for (let start = 0; start < node.children.length; start += size) {
    const held = node.children.slice(start, start + size);
    const label = held[0].label + " .. " + held[held.length - 1].label;
    const run = { label, path: node.path, parent: node, children: held, op: -1 };
    held.forEach(child => { child.parent = run; });
    runs.push(run);
  }
  node.children = runs;
}

function sumUp(node, plan, depth = 0) {
  node.depth = depth;
  node.links = [];
  if (node.op >= 0) {
    node.count = 1;
    node.forward = plan.forward[node.op];
    node.backward = plan.backward[node.op];
    node.cuts = new Map([[plan.cuts[node.op], 1]]);
    return;
  }
  node.count = node.forward = node.backward = 0;
  node.cuts = new Map();
  for (const child of node.children) {
    sumUp(child, plan, depth + 1);
    node.count += child.count;
    node.forward += child.forward;
    node.backward += child.backward;
    child.cuts.forEach((number, cut) => node.cuts.set(cut, (node.cuts.get(cut) || 0) + number));
  }
}

// Adds every edge to the innermost module that holds both ends, between the two children it connects there.
function linkSiblings(plan, leaves) {
  const known = new Map();
  for (let i = 0; i < plan.edges.length; i += 4) {
    let from = leaves[plan.edges[i]], to = leaves[plan.edges[i + 1]];
    while (from.parent !== to.parent) {
      if (from.depth >= to.depth) from = from.parent; else to = to.parent;
    }
    if (from === to) continue;
    if (!known.has(from)) known.set(from, new Map());
    let link = known.get(from).get(to);
    if (!link) {
      link = { from, to, forward: 0, backward: 0, count: 0 };
      known.get(from).set(to, link);
      from.parent.links.push(link);
    }
    link.forward += plan.edges[i + 2];
    link.backward += plan.edges[i + 3];
    link.count++;
  }
}

// Places `node` and what is open in it with its corner at (0, 0) of its parent: sets x, y, width and height.
function place(node, open) {
  if (node.op >= 0 || !open.has(node)) {
    node.width = BOX.width;
    node.height = BOX.height;
    return;
  }
  node.children.forEach((child, index) => { place(child, open); child.order = index; });
  const before = new Map(node.children.map(child => [child, []]));
  for (const link of node.links) if (link.from.order < link.to.order) before.get(link.to).push(link.from);
  const rows = [];
  for (const child of node.children) {
    child.row = 1 + Math.max(-1, ...before.get(child).map(source => source.row));
    (rows[child.row] = rows[child.row] || []).push(child);
  }
  const lines = [];
  for (const row of rows) for (let i = 0; i < row.length; i += BOX.across) lines.push(row.slice(i, i + BOX.across));
  const wide = line => line.reduce((sum, child) => sum + child.width + BOX.gapX, -BOX.gapX);
  const inner = Math.max(BOX.width, ...lines.map(wide));
  let y = BOX.head + BOX.pad;
  for (const line of lines) {
    let x = BOX.pad + (inner - wide(line)) / 2;
    for (const child of line) {
      child.x = x;
      child.y = y;
      x += child.width + BOX.gapX;
    }
    y += Math.max(...line.map(child => child.height)) + BOX.gapY;
  }
  node.width = inner + 2 * BOX.pad;
  node.height = y - BOX.gapY + BOX.pad;
}

// Returns the modules to show open at first: from the outside in, for as long as at most `most` boxes are seen.
// Of modules that differ by their number alone only the first opens.
function openAtFirst(root, most) {
  const open = new Set([root]), seen = new Set();
  let shown = root.children.length, queue = root.children.slice();
  while (queue.length) {
    const next = [];
    for (const node of queue) {
      const alike = node.path.replace(/\d+/g, "*");
      if (node.op >= 0 || seen.has(alike) || shown + node.children.length > most) continue;
      if (/\d/.test(node.label)) seen.add(alike);
      open.add(node);
      shown += node.children.length;
      next.push(...node.children);
    }
    queue = next;
  }
  return open;
}

// Calls `draw(node, x, y, detailed)` for what lies in `view` (world coordinates), outside first. `detailed` is false
// for an open module whose picture would be smaller than `least` units: then nothing inside is visited.
function visit(node, open, view, least, draw, x = 0, y = 0) {
  if (x > view.right || y > view.bottom || x + node.width < view.left || y + node.height < view.top) return;
  const detailed = node.op < 0 && open.has(node) && node.height >= least;
  draw(node, x, y, detailed);
  if (detailed) for (const child of node.children) visit(child, open, view, least, draw, x + child.x, y + child.y);
}

// Returns the innermost node that is drawn at a point, and its corner.
function nodeAt(node, open, px, py, least, x = 0, y = 0) {
  if (px < x || py < y || px > x + node.width || py > y + node.height) return null;
  if (node.op < 0 && open.has(node) && node.height >= least) {
    for (const child of node.children) {
      const found = nodeAt(child, open, px, py, least, x + child.x, y + child.y);
      if (found) return found;
    }
  }
  return { node, x, y };
}

// Returns the corner of `node` in world coordinates.
function cornerOf(node) {
  let x = 0, y = 0;
  for (let at = node; at.parent; at = at.parent) { x += at.x; y += at.y; }
  return { x, y };
}

if (typeof module !== "undefined") {
  module.exports = { BOX, buildTree, place, openAtFirst, visit, nodeAt, cornerOf };
}
