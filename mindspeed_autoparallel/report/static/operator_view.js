/* global tr, BOX, buildTree, place, openAtFirst, visit, nodeAt, cornerOf */
// Draws the module tree of a plan on a canvas: zoom, pan, open and close modules, find an operator by its name.
const byId = id => document.getElementById(id);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function bytes(value) {
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return (value / size).toFixed(1) + " " + name;
  }
  return value + " B";
}

function explore(plan) {
  const canvas = byId("explorer"), { root, leaves } = buildTree(plan);
  let open = openAtFirst(root, 60), scale = 1, left = 0, top = 0, selected = null, waiting = false, colours = {};
  const detailHeight = 60;

  const cutName = cut => plan.cutsets[cut].map(axis => axis < 0 ? "–" : plan.axes[axis]).join(", ");
  function palette() {
    colours = { axes: plan.axes.map((_, index) => style("--c" + index % 8)) };
    for (const name of ["card", "ink", "soft", "line", "idle", "backward", "accent"]) colours[name] = style("--" + name);
  }
  // Shows the whole model, or its upper end at no smaller a scale than `least`.
  function fit(least) {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    scale = Math.min(1.5, (width - 20) / root.width, Math.max(least, (height - 20) / root.height));
    left = root.width / 2 - width / 2 / scale;
    top = Math.min(-10 / scale, root.height / 2 - height / 2 / scale);
    if (scale * root.height > height) top = -10 / scale;
    redraw();
  }
  function zoom(factor, x, y) {
    const next = Math.max(0.002, Math.min(4, scale * factor));
    left += x / scale - x / next;
    top += y / scale - y / next;
    scale = next;
    redraw();
  }
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }
  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio * scale, 0, 0, ratio * scale, -left * scale * ratio, -top * scale * ratio);
    context.textBaseline = "middle";
    const view = { left, top, right: left + width / scale, bottom: top + height / scale };
    let drawn = 0;
    visit(root, open, view, detailHeight / scale, (node, x, y, detailed) => {
      drawn++;
      if (detailed) container(context, node, x, y); else box(context, node, x, y);
    });
    canvas.dataset.drawn = drawn;
  }
  function outline(context, node, x, y, fill) {
    context.fillStyle = fill;
    context.fillRect(x, y, node.width, node.height);
    context.strokeStyle = node === selected ? colours.accent : node.forward + node.backward ? colours.backward : colours.line;
    context.lineWidth = (node === selected ? 3 : 1) / Math.min(1, scale);
    context.strokeRect(x, y, node.width, node.height);
  }
  function write(context, text, x, y, room, colour, size = 12) {
    if (size * scale < 5) return;
    context.font = size + "px system-ui, sans-serif";
    context.fillStyle = colour;
    const most = Math.floor(room / (size * 0.54));
    context.fillText(text.length <= most ? text : "…" + text.slice(1 - most), x, y);
  }
  const sentLabel = node => node.forward + node.backward ? bytes(node.forward + node.backward) : "";
  function container(context, node, x, y) {
    outline(context, node, x, y, node.depth % 2 ? colours.card : colours.idle);
    const label = "− " + (node.path || node.label) + "  (" + node.count + ")";
    write(context, label, x + 8, y + BOX.head / 2 + 2, node.width - 100, colours.ink, 13);
    write(context, sentLabel(node), x + node.width - 90, y + BOX.head / 2 + 2, 90, colours.backward, 11);
    for (const link of node.links) edge(context, link, x, y);
  }
  function edge(context, link, x, y) {
    const sent = link.forward + link.backward;
    if (!sent && scale < 0.15) return;
    const x0 = x + link.from.x + link.from.width / 2, y0 = y + link.from.y + link.from.height;
    const x1 = x + link.to.x + link.to.width / 2, y1 = y + link.to.y;
    context.strokeStyle = sent ? colours.backward : colours.line;
    context.lineWidth = (sent ? 2.5 : 1.2) / Math.min(1, Math.max(scale, 0.2));
    // What passes other rows goes around them at the right.
    const aside = link.to.row - link.from.row > 1 ? Math.max(link.from.width, link.to.width) / 2 + 16 : 0;
    const middle = (y0 + y1) / 2;
    context.beginPath();
    context.moveTo(x0, y0);
    if (aside) {
      const beside = Math.max(x0, x1) + aside;
      context.bezierCurveTo(x0, y0 + BOX.gapY, beside, y0, beside, y0 + BOX.gapY);
      context.lineTo(beside, y1 - BOX.gapY);
      context.bezierCurveTo(beside, y1, x1, y1 - BOX.gapY, x1, y1);
    } else context.bezierCurveTo(x0, middle, x1, middle, x1, y1);
    context.stroke();
    if (sent) write(context, bytes(link.forward) + " + " + bytes(link.backward), x1 + 6, y1 - 7, 160, colours.soft, 10);
  }
  function box(context, node, x, y) {
    outline(context, node, x, y, colours.card);
    const ordered = [...node.cuts].sort((a, b) => b[1] - a[1]);
    let at = x;
    for (const [cut, number] of ordered) {  // a bar of the cuts in it: an axis per mesh dim, shares by operators
      const wide = node.width * number / node.count, dims = plan.cutsets[cut], high = 8 / Math.max(1, dims.length);
      dims.forEach((axis, dim) => {
        context.fillStyle = axis < 0 ? colours.idle : colours.axes[axis];
        context.fillRect(at, y + node.height - 8 + dim * high, wide, high);
      });
      at += wide;
    }
    const modules = node.op < 0 ? "+ " : "", many = node.op < 0 ? "  (" + node.count + ")" : "";
    const room = node.width - 16, line = Math.min(14, node.height / 3);
    write(context, modules + node.label + many, x + 8, y + line, room, colours.ink, Math.min(200, node.height * 0.27));
    const below = node.op >= 0 ? cutName(plan.cuts[node.op]) : cutName(ordered[0][0]) + (ordered.length > 1 ? " .." : "");
    write(context, below, x + 8, y + line + 15, room - 66, colours.soft, 10.5);
    write(context, sentLabel(node), x + node.width - 66, y + line + 15, 64, colours.backward, 10.5);
  }

  function tell(node) {
    selected = node;
    const lines = [];
    if (node.op >= 0) {
      lines.push(node.path, tr("{}, output {}", plan.kinds[plan.kind[node.op]], plan.shapes[plan.shape[node.op]]));
      lines.push(tr("cut on each mesh dim: {}", cutName(plan.cuts[node.op])));
    } else {
      lines.push(tr("{}: {} operators", node.path || tr("model"), node.count));
      for (const [cut, number] of [...node.cuts].sort((a, b) => b[1] - a[1]).slice(0, 6)) {
        lines.push(tr("{} cut by {}", number, cutName(cut)));
      }
    }
    lines.push(tr("sent forward {}, backward {}", bytes(node.forward), bytes(node.backward)));
    for (let i = 0, told = 0; node.op >= 0 && i < plan.edges.length && told < 12; i += 4) {
      const [from, to, forward, backward] = plan.edges.slice(i, i + 4);
      if (to !== node.op && from !== node.op) continue;
      const way = to === node.op ? tr("reads {}", plan.names[from]) : tr("is read by {}", plan.names[to]);
      lines.push(way + (forward + backward ? ": " + bytes(forward) + " + " + bytes(backward) : ""));
      told++;
    }
    byId("explored").textContent = lines.join("\n");
    redraw();
  }
  function toggle(node) {
    if (node.op >= 0) return;
    if (open.has(node)) open.delete(node); else open.add(node);
    const before = cornerOf(node);
    place(root, open);
    const after = cornerOf(node);
    left += after.x - before.x;
    top += after.y - before.y;
    redraw();
  }
  function setOpen(modules, least) {
    open = modules;
    place(root, open);
    fit(least);
  }
  function everyModule(node, found = new Set()) {
    if (node.op < 0) { found.add(node); node.children.forEach(child => everyModule(child, found)); }
    return found;
  }
  let last = -1;
  function find(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    for (let step = 1; wanted.length && step <= leaves.length; step++) {
      const at = (last + step) % leaves.length;
      if (!wanted.every(word => plan.names[at].toLowerCase().includes(word))) continue;
      last = at;
      for (let node = leaves[at].parent; node; node = node.parent) open.add(node);
      place(root, open);
      const corner = cornerOf(leaves[at]);
      scale = Math.max(scale, 0.9);
      left = corner.x + BOX.width / 2 - canvas.clientWidth / 2 / scale;
      top = corner.y + BOX.height / 2 - canvas.clientHeight / 2 / scale;
      return tell(leaves[at]);
    }
    byId("explored").textContent = wanted.length ? tr("No operator has {} in its name.", wanted.join(tr(" and "))) : "";
  }

  const spot = event => {
    const area = canvas.getBoundingClientRect();
    return [event.clientX - area.left, event.clientY - area.top];
  };
  const under = event => {
    const [x, y] = spot(event);
    return nodeAt(root, open, left + x / scale, top + y / scale, detailHeight / scale);
  };
  let grabbed = null, moved = false;
  canvas.addEventListener("pointerdown", event => {
    grabbed = [event.clientX, event.clientY, left, top];
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!grabbed) return;
    moved = moved || Math.abs(event.clientX - grabbed[0]) + Math.abs(event.clientY - grabbed[1]) > 4;
    left = grabbed[2] - (event.clientX - grabbed[0]) / scale;
    top = grabbed[3] - (event.clientY - grabbed[1]) / scale;
    redraw();
  });
  canvas.addEventListener("pointerup", event => {
    const found = !moved && under(event);
    grabbed = null;
    if (found) tell(found.node);
  });
  canvas.addEventListener("pointercancel", () => { grabbed = null; });
  canvas.addEventListener("dblclick", event => { const found = under(event); if (found) toggle(found.node); });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.003), ...spot(event));
  }, { passive: false });
  const middle = () => [canvas.clientWidth / 2, canvas.clientHeight / 2];
  canvas.addEventListener("keydown", event => {
    const by = 80 / scale, actions = {
      ArrowLeft: () => { left -= by; }, ArrowRight: () => { left += by; },
      ArrowUp: () => { top -= by; }, ArrowDown: () => { top += by; },
      "+": () => zoom(1.3, ...middle()), "=": () => zoom(1.3, ...middle()), "-": () => zoom(1 / 1.3, ...middle()),
      "0": () => fit(0), Enter: () => selected && toggle(selected),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
    redraw();
  });
  byId("closer").addEventListener("click", () => zoom(1.5, ...middle()));
  byId("wider").addEventListener("click", () => zoom(1 / 1.5, ...middle()));
  byId("whole").addEventListener("click", () => fit(0));
  byId("open-all").addEventListener("click", () => setOpen(everyModule(root), 0));
  byId("close-all").addEventListener("click", () => setOpen(openAtFirst(root, root.children.length), 0));
  byId("find").addEventListener("keydown", event => { if (event.key === "Enter") find(event.target.value); });
  addEventListener("resize", redraw);
  addEventListener("pagechange", () => { palette(); redraw(); });
  palette();
  setOpen(open, 0.75);
}
const held = document.getElementById("explorer-data");
if (held) explore(JSON.parse(held.textContent));
document.documentElement.dataset.ready = "yes";
