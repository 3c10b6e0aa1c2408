const root = document.documentElement;
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(root).getPropertyValue(name).trim();

// Tooltips: text of data-tip, by mouse and by keyboard.
const tip = $("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.visibility = text ? "visible" : "hidden";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
document.addEventListener("mousemove", event => {
  if (event.target.tagName === "CANVAS") return;
  const owner = event.target.closest && event.target.closest("[data-tip]");
  showTip(owner ? owner.dataset.tip : "", event.clientX, event.clientY);
});
document.addEventListener("focusin", event => {
  const box = event.target.getBoundingClientRect();
  showTip(event.target.dataset.tip || "", box.left, box.bottom - 14);
});

const redraws = [];
const redraw = () => redraws.forEach(draw => draw());
addEventListener("pagechange", redraw);

// The filter of configurations: words that must all be there, and the outcomes chosen.
const search = $("search");
if (search) {
  const groups = [...document.querySelectorAll(".group")];
  const start = groups.map(group => group.open);
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const pressed = [...document.querySelectorAll("[data-outcome][aria-pressed=true]")].map(b => b.dataset.outcome);
    let total = 0;
    groups.forEach((group, index) => {
      const chosen = !pressed.length || pressed.includes(group.dataset.group);
      let shown = 0;
      for (const row of group.querySelectorAll("tbody tr")) {
        const hit = chosen && words.every(word => row.textContent.toLowerCase().includes(word));
        row.hidden = !hit;
        shown += hit;
      }
      group.hidden = !shown;
      group.open = words.length || pressed.length ? shown > 0 : start[index];
      group.querySelector(".n").textContent = shown;
      total += shown;
    });
    $("shown").textContent = tr("{} shown", total);
  };
  search.addEventListener("input", filter);
  addEventListener("pagechange", filter);
  for (const button of document.querySelectorAll("[data-outcome]")) button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    filter();
  });
}

function time(us) {
  if (us >= 1e6) return (us / 1e6).toFixed(us < 1e7 ? 3 : 2) + " s";
  return us >= 1e3 ? (us / 1e3).toFixed(1) + " ms" : us.toFixed(0) + " µs";
}

function timeline(data) {
  const rows = data.rows, end = data.end_us, detail = $("detail"), overview = $("overview");
  const STEP = 5, rowHeight = rows.length > 16 ? 15 : 22, axis = 24, right = 48;
  let left = 58, from = 0, to = end, highlighted = -1;
  function prepare(canvas, height) {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return [context, width];
  }
  // Chunks of a rank in shades: the first one full, later ones paler.
  const shade = chunk => data.num_chunks > 1 ? 1 - 0.55 * chunk / (data.num_chunks - 1) : 1;
  function first(row, at) {
    let low = 0, high = row.length / STEP;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle * STEP + 3] + row[middle * STEP + 4] < at) low = middle + 1; else high = middle;
    }
    return low * STEP;
  }
  function blocks(context, row, y, height, x0, width, start, stop, text) {
    const scale = width / (stop - start), colours = [css("--forward"), css("--backward"), css("--c4")], ink = css("--on-bar");
    let drawn = 0;
    for (let i = first(row, start); i < row.length && row[i + 3] < stop; i += STEP) {
      const a = Math.max(0, (row[i + 3] - start) * scale);
      const b = Math.min(width, (row[i + 3] + row[i + 4] - start) * scale);
      const gap = b - a > 3 ? 1 : 0;
      context.globalAlpha = shade(row[i + 1]);
      context.fillStyle = colours[row[i]];
      context.fillRect(x0 + a, y, Math.max(b - a - gap, 0.4), height);
      context.globalAlpha = 1;
      drawn++;
      const label = row[i] === 2 ? data.names[row[i + 2]] : String(row[i + 2]);
      if (text && b - a > 7 * label.length + 5) {
        context.fillStyle = shade(row[i + 1]) < 0.7 ? css("--ink") : ink;
        context.textAlign = "center";
        context.fillText(label, x0 + (a + b) / 2, y + height / 2 + 0.5);
      }
    }
    return drawn;
  }
  function draw() {
    const [context, width] = prepare(detail, axis + rows.length * rowHeight), inner = width - left - right;
    let drawn = 0;
    context.fillStyle = css("--soft");
    context.textAlign = "right";
    context.fillText(tr("busy"), width - 4, axis / 2);
    rows.forEach((row, rank) => {
      const y = axis + rank * rowHeight, height = rowHeight - (rowHeight > 16 ? 4 : 2);
      context.fillStyle = css("--idle");
      context.fillRect(left, y, inner, height);
      drawn += blocks(context, row, y, height, left, inner, from, to, rowHeight >= 15);
      context.fillStyle = css(rank === highlighted ? "--ink" : "--soft");
      context.textAlign = "left";
      context.fillText(tr("rank {}", rank), 2, y + height / 2 + 0.5);
      context.textAlign = "right";
      context.fillText((100 * data.busy[rank]).toFixed(0) + " %", width - 4, y + height / 2 + 0.5);
    });
    const rough = (to - from) / Math.max(2, inner / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(k => k * power).find(value => value >= rough);
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = left + (at - from) / (to - from) * inner;
      context.fillStyle = css("--line");
      context.fillRect(x, axis - 5, 1, 5);
      context.fillStyle = css("--soft");
      const unit = to >= 1e6 ? 1e6 : to >= 1e3 ? 1e3 : 1;
      const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
      context.fillText((at / unit).toFixed(digits) + (unit === 1e6 ? " s" : unit === 1e3 ? " ms" : " µs"), x, axis / 2);
    }
    detail.dataset.drawn = drawn;
    strip();
    for (const button of document.querySelectorAll("[data-phase]")) {
      const phase = data.phases[button.dataset.phase];
      const same = Math.abs(phase.start - from) + Math.abs(phase.end - to) < 1e-6 * end;
      button.setAttribute("aria-pressed", same);
    }
  }
  function strip() {
    const thin = Math.max(2, Math.min(5, 60 / rows.length));
    const [context, width] = prepare(overview, rows.length * thin), inner = width - left - right;
    rows.forEach((row, rank) => {
      context.fillStyle = css("--idle");
      context.fillRect(left, rank * thin, inner, thin);
      blocks(context, row, rank * thin, Math.max(1, thin - 0.5), left, inner, 0, end, false);
    });
    const a = left + from / end * inner, b = left + to / end * inner, height = rows.length * thin;
    if (to - from < end * 0.999) {
      context.globalAlpha = 0.5;
      context.fillStyle = css("--card");
      context.fillRect(left, 0, a - left, height);
      context.fillRect(b, 0, left + inner - b, height);
      context.globalAlpha = 1;
      context.strokeStyle = css("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(a + 0.75, 0.75, Math.max(3, b - a - 1.5), height - 1.5);
    }
  }
  function view(a, b) {
    const length = Math.max(Math.min(b - a, end), end * 1e-5);
    from = Math.max(0, Math.min(a, end - length));
    to = from + length;
    draw();
  }
  const zoom = (factor, at) => view(at - (at - from) * factor, at + (to - at) * factor);
  const timeAt = (canvas, x, a, b) => {
    const box = canvas.getBoundingClientRect();
    return a + (x - box.left - left) / (box.width - left - right) * (b - a);
  };
  let grabbed = null;
  detail.addEventListener("pointerdown", event => {
    grabbed = [event.clientX, from, to];
    detail.setPointerCapture(event.pointerId);
  });
  detail.addEventListener("pointerup", () => { grabbed = null; });
  detail.addEventListener("pointercancel", () => { grabbed = null; });
  detail.addEventListener("pointermove", event => {
    const box = detail.getBoundingClientRect();
    if (grabbed) {
      const moved = (event.clientX - grabbed[0]) / (box.width - left - right) * (grabbed[2] - grabbed[1]);
      return view(grabbed[1] - moved, grabbed[2] - moved);
    }
    const rank = Math.floor((event.clientY - box.top - axis) / rowHeight), at = timeAt(detail, event.clientX, from, to);
    if (rank < 0 || rank >= rows.length) return showTip("", 0, 0);
    const row = rows[rank], i = first(row, at);
    let text = tr("Rank {}", rank) + ": " + data.labels[rank];
    if (at >= from && at <= to) {
      if (i < row.length && row[i + 3] <= at) {
        text += "\n" + (row[i] === 2 ? data.names[row[i + 2]] :
          tr(row[i] ? "backward of microbatch {}" : "forward of microbatch {}", row[i + 2])) +
          (data.num_chunks > 1 ? tr(", chunk {}", row[i + 1]) : "") +
          "\n" + tr("{}, starts at {}", time(row[i + 4]), time(row[i + 3]));
      } else {
        const past = i ? row[i - 2] + row[i - 1] : 0, next = i < row.length ? row[i + 3] : end;
        text += "\n" + tr("waiting {}", time(next - past));
      }
    }
    if (rank !== highlighted) { highlighted = rank; draw(); }
    showTip(text, event.clientX, event.clientY);
  });
  detail.addEventListener("pointerleave", () => { highlighted = -1; showTip("", 0, 0); draw(); });
  detail.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.003), timeAt(detail, event.clientX, from, to));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const moved = event.deltaX / detail.clientWidth * (to - from);
      view(from + moved, to + moved);
    }
  }, { passive: false });
  detail.addEventListener("dblclick", event => zoom(0.4, timeAt(detail, event.clientX, from, to)));
  detail.addEventListener("keydown", event => {
    const moved = (to - from) * 0.15, middle = (from + to) / 2;
    const actions = {
      ArrowLeft: () => view(from - moved, to - moved), ArrowRight: () => view(from + moved, to + moved),
      "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle),
      "-": () => zoom(1 / 0.6, middle), "0": () => view(0, end),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  const jump = event => {
    if (!event.buttons) return;
    const at = timeAt(overview, event.clientX, 0, end), half = (to - from < end ? to - from : end / 5) / 2;
    view(at - half, at + half);
  };
  overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); jump(event); });
  overview.addEventListener("pointermove", jump);
  $("closer").addEventListener("click", () => zoom(0.5, (from + to) / 2));
  $("wider").addEventListener("click", () => zoom(2, (from + to) / 2));
  for (const button of document.querySelectorAll("[data-phase]")) button.addEventListener("click", () => {
    const phase = data.phases[button.dataset.phase];
    view(phase.start, phase.end);
  });
  // Opens where single microbatches can be read: the whole step where that is wide enough, else the warm-up.
  const dense = rows[0].length / STEP > 80 && data.phases[1];
  if (dense) { from = dense.start; to = dense.end; }
  redraws.push(draw);
  draw();
}
const data = JSON.parse($("timeline-data").textContent);
if (data.rows.length) timeline(data);
addEventListener("resize", redraw);
root.dataset.ready = "yes";
