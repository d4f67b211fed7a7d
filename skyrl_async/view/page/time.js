// What ran when: a row per stage, engine and track of the trace on one axis; and the longest waits.
"use strict";

const MOST_LANES = 12, ROW = 22, TOP = 24;
const time = { run: 0, begin: null, end: null, rows: [], spans: null, follows: true };

const MEANINGS = {
  "#2f6db5": "processing, training", "var(--idle)": "waiting for input", "#d9822b": "waiting for output", "#c8504b": "trainer waiting",
  "#3d9a6d": "publishing", "#1f97a8": "generation of a group", "#8e5bb5": "evaluation", "#a3762f": "engine loads or restarts",
  [`linear-gradient(90deg, ${[0, 1, 2].map((version) => `hsl(${versionHue(version)} 70% var(--lightness))`)})`]: "engine's version: a hue each, darker the more steps behind",
  "var(--ink)": "engine paused", "var(--death)": "engine's death", "var(--soft)": "engine's removal",
};
const ENDS = { death: "--death", removal: "--soft" };
const END = 7; // half the width that answers to the pointer
const DARKER = 0.16, MOST_DARKER = 4; // per step behind; steps that are told apart

function buildTime() {
  const canvas = el("canvas", { id: "timeline" });
  const move = (factor, shift = 0) => {
    if (!time.spans) return;
    const { begin, end } = time.spans;
    const middle = (begin + end) / 2 + shift * (end - begin), half = (factor * (end - begin)) / 2;
    setWindow(middle - half, middle + half);
  };
  byId("time").append(
    el("div", { className: "bar" },
      el("select", { id: "time-run", ariaLabel: "run", onchange: (e) => { time.run = Number(e.target.value); follow(); } }),
      el("button", { onclick: () => follow() }, "last minute"),
      el("button", { onclick: () => setWindow(0, time.spans?.last), hidden: RECORDED }, "whole run"),
      el("button", { onclick: () => move(0.5), ariaLabel: "zoom in" }, "+"),
      el("button", { onclick: () => move(2), ariaLabel: "zoom out" }, "−"),
      el("button", { onclick: () => move(1, -0.5), ariaLabel: "earlier" }, "←"),
      el("button", { onclick: () => move(1, 0.5), ariaLabel: "later" }, "→"),
      el("span", { id: "time-state", className: "soft" })),
    el("div", { className: "card" },
      el("div", { className: "legend" }, ...Object.entries(MEANINGS).map(([color, text]) => el("i", { style: { "--of": color } }, text))), canvas),
    el("div", { id: "waits" }),
  );
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    if (!time.spans) return;
    const { begin, end } = time.spans, at = begin + ((event.offsetX - left()) / (canvas.clientWidth - left())) * (end - begin);
    const factor = (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8; // some systems turn shift + wheel sideways
    setWindow(at - (at - begin) * factor, at + (end - at) * factor);
  }, { passive: false });
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { if (!time.spans) return; from = { x: event.clientX, begin: time.spans.begin, end: time.spans.end }; canvas.setPointerCapture(event.pointerId); });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { from = null; }); // cancelled: a finger scrolls the page
  canvas.addEventListener("pointerleave", (event) => hintAt(event, ""));
  canvas.addEventListener("pointermove", (event) => {
    if (from) {
      const shift = ((from.x - event.clientX) / (canvas.clientWidth - left())) * (from.end - from.begin);
      setWindow(from.begin + shift, from.end + shift);
      return;
    }
    const span = spanAt(event.offsetX, event.offsetY);
    hintAt(event, span ? describe(span) : "");
  });
  addEventListener("resize", later(150, drawTime));
}

function follow() {
  time.begin = time.end = null;
  time.follows = true;
  return loadTime();
}

function setWindow(begin, end) {
  if (!time.spans) return;
  const [from, last] = RECORDED ? [RECORDED.runs[time.run].spans.begin, RECORDED.runs[time.run].spans.end] : [0, time.spans.last];
  const length = Math.min(Math.max(end - begin, 0.01), Math.max(last - from, 0.01));
  const first = Math.min(Math.max(from, begin), Math.max(from, last - length));
  Object.assign(time, { begin: first, end: first + length, follows: false });
  Object.assign(time.spans, { begin: first, end: first + length });
  drawTime();
  loadTimeSoon();
}

const loadTimeSoon = later(150, () => loadTime());

async function loadTime() {
  const select = byId("time-run");
  select.replaceChildren(...overview.runs.map((_, run) => el("option", { value: run, selected: run === time.run }, runName(run))));
  select.hidden = overview.runs.length < 2;
  const window = time.begin === null ? {} : { begin: time.begin, end: time.end };
  try {
    time.spans = await ask("spans", { run: time.run, ...window });
  } catch (error) {
    showError(byId("waits"), error);
    return;
  }
  time.spans.spans = time.spans.spans.concat(ofEngines(time.spans));
  drawTime();
  drawWaits();
}

// What each engine served between its loads, since when the trainer was how far ahead of it, and its pauses.
function ofEngines({ spans, end }) {
  const of = {}, gathers = spans.filter((span) => span.name === "gather").sort((a, b) => a.begin - b.begin);
  const pauses = new Map(spans.filter((span) => span.track === "publish/pause").map((span) => [span.args.version, span]));
  for (const span of spans) if (span.track.startsWith("engines/")) (of[span.track] ??= []).push(span);
  return Object.values(of).flatMap((changes) => changes.sort((a, b) => a.begin - b.begin).flatMap((change, i) => {
    const { version, acknowledge_s: acknowledged } = change.args, pause = pauses.get(version), until = changes[i + 1]?.begin ?? end, found = [];
    if (change.name === "load" && until > change.end) {
      const newer = gathers.slice(numOf(gathers, (gather) => gather.args.version <= version), numOf(gathers, (gather) => gather.begin < until));
      const behind = newer.map((gather) => ({ begin: gather.begin, steps: gather.args.version - version }));
      found.push({ ...change, name: "serves", begin: change.end, end: until, behind, args: { version, "steps behind at the end": behind.at(-1)?.steps ?? 0 } });
    }
    if (change.name === "load" && pause) found.push({ ...pause, track: change.track, lane: change.lane, begin: acknowledged === undefined ? pause.begin : change.begin + acknowledged });
    return found;
  }));
}

// How many spans of a list that begins with them are so.
function numOf(spans, isSo) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isSo(spans[middle])) low = middle + 1;
    else high = middle;
  }
  return low;
}

const left = () => (byId("timeline").parentElement.clientWidth < 600 ? 96 : 150); // room for the names of rows
const ORDER = ["stages/", "engines/", "publish", "training", "waiting", "evaluation", "devices", "generation"];
const place = (track) => { const found = ORDER.findIndex((start) => track.startsWith(start)); return found < 0 ? ORDER.length : found; };

function drawTime() {
  if (!time.spans) return;
  const { spans, begin, end, last, num_short: numShort } = time.spans;
  const keys = new Map();
  const lanes = Math.max(0, ...spans.map((span) => (span.track === "generation" ? span.lane : 0)));
  for (const span of spans) if (span.track !== "generation" || span.lane <= MOST_LANES) keys.set(`${span.track}\n${span.lane}`, span);
  time.rows = [...keys.values()].sort((a, b) => place(a.track) - place(b.track) || (a.track < b.track ? -1 : a.track > b.track ? 1 : a.lane - b.lane));
  const rowOf = new Map(time.rows.map((span, row) => [`${span.track}\n${span.lane}`, row]));
  const canvas = byId("timeline"), scale = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth - 24, height = TOP + ROW * Math.max(1, time.rows.length) + 4;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name);
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = "12px system-ui, sans-serif";
  draw.textBaseline = "middle";
  const names = left();
  const x = (at) => names + ((at - begin) / (end - begin)) * (width - names);
  const step = niceStep((end - begin) / Math.max(2, Math.min(8, (width - names) / 90)));
  draw.fillStyle = color("--soft");
  draw.strokeStyle = color("--line");
  for (let tick = Math.ceil(begin / step) * step; tick < end; tick += step) {
    const text = clock(tick, step);
    if (x(tick) + 3 + draw.measureText(text).width <= width) draw.fillText(text, x(tick) + 3, 10);
    draw.beginPath(); draw.moveTo(x(tick), 0); draw.lineTo(x(tick), height); draw.stroke();
  }
  time.rows.forEach((span, row) => {
    const y = TOP + row * ROW;
    if (row % 2) { draw.fillStyle = color("--page"); draw.fillRect(0, y, width, ROW); }
    draw.fillStyle = color("--soft");
    draw.fillText(span.lane > 1 ? "" : label(span.track), 0, y + ROW / 2, names - 8);
  });
  time.boxes = [];
  const ends = [];
  for (const span of spans) {
    const row = rowOf.get(`${span.track}\n${span.lane}`);
    if (row === undefined || span.end < begin || span.begin > end) continue;
    const from = Math.max(names, x(span.begin)), to = Math.min(width, x(span.end)), y = TOP + row * ROW + 3;
    if (Object.hasOwn(ENDS, span.name)) {
      ends.push({ from: from - END, to: from + END, row, span });
      continue;
    }
    draw.fillStyle = colorOf(span, color);
    draw.globalAlpha = 0.15 + 0.85 * (span.args?.share ?? 1); // of short spans, drawn together
    if (isPause(span)) draw.fillRect(from, y + ROW - 9, Math.max(1, to - from - 0.5), 3);
    else draw.fillRect(from, y, Math.max(1, to - from - 0.5), ROW - 6);
    draw.globalAlpha = 1;
    time.boxes.push({ from, to: Math.max(to, from + 2), row, span });
    for (const { begin: since, steps } of span.behind || []) {
      draw.fillStyle = `rgb(0 0 0 / ${DARKER})`;
      const first = Math.max(from, x(since));
      if (steps <= MOST_DARKER && first < to) draw.fillRect(first, y, to - first - 0.5, ROW - 6);
    }
    const text = textsOf(span).find((one) => draw.measureText(one).width < to - from - 6);
    if (text) {
      draw.fillStyle = span.name === "serves" ? color("--ink") : "#fff";
      draw.fillText(text, from + (span.name === "restart" ? 10 : 3), TOP + row * ROW + ROW / 2);
    }
  }
  for (const end of ends) drawEnd(draw, (end.from + end.to) / 2, TOP + end.row * ROW, color, ENDS[end.span.name]);
  time.boxes.push(...ends);
  byId("time-state").textContent = spans.length
    ? `${clock(begin, step)} to ${clock(end, step)} of ${duration(last)}${numShort ? ` · ${number(numShort)} short spans drawn together` : ""}${lanes > MOST_LANES ? ` · generation: ${MOST_LANES} of ${lanes} rows` : ""} · drag: move · ctrl or shift + wheel: zoom${RECORDED ? " · the report has the last minute" : ""}`
    : "no trace (logging.trace_max_gb=0, or the run has not begun)";
}

// A cross, drawn over whatever came before and after.
function drawEnd(draw, x, y, color, ink) {
  for (const [name, lineWidth] of [["--card", 6], [ink, 3]]) {
    Object.assign(draw, { strokeStyle: color(name), lineWidth });
    draw.beginPath();
    for (const side of [-1, 1]) { draw.moveTo(x - 5, y + ROW / 2 - 6 * side); draw.lineTo(x + 5, y + ROW / 2 + 6 * side); }
    draw.stroke();
  }
  draw.lineWidth = 1;
}

const label = (track) => track.replace(/^stages\//, "").replace(/^engines\//, "");
const isWait = (span) => "share" in (span.args || {}) || "item" in (span.args || {}) || span.track === "waiting";
const isPause = (span) => span.name === "pause" && span.track.startsWith("engines/");
// What may be written on a span, the longest first.
const textsOf = (span) => (isWait(span) || isPause(span) ? [] : span.name === "serves" ? [itemOf(span), `v${span.args.version}`, `${span.args.version}`] : [itemOf(span)]);
const itemOf = (span) => (isWait(span) ? span.name : span.track === "generation" ? String(span.args.uid ?? span.name) : span.name + (span.args.version !== undefined && !span.track.startsWith("stages/") ? ` v${span.args.version}` : ""));

function colorOf(span, color) {
  if (span.name === "waiting for input") return color("--idle");
  if (span.name === "waiting for output") return "#d9822b";
  if (span.name === "serves") return `hsl(${versionHue(span.args.version)} 70% ${color("--lightness")})`;
  if (isPause(span)) return color("--ink");
  if (span.track === "waiting") return "#c8504b";
  return { publish: "#3d9a6d", training: "#2f6db5", evaluation: "#8e5bb5", generation: "#1f97a8", devices: "#a3762f", engines: "#a3762f" }[span.track.split("/")[0]] || "#2f6db5";
}

function describe(span) {
  const args = Object.entries(span.args || {}).map(([key, value]) => `${key}: ${shown(String(value))}`);
  return [`${label(span.track)}: ${shown(span.name)}`, `${number(span.begin, 6)} s, for ${duration(span.end - span.begin)}`, ...args].join("\n");
}

function spanAt(x, y) {
  const row = Math.floor((y - TOP) / ROW);
  const hits = (time.boxes || []).filter((box) => box.row === row && box.from <= x && x <= box.to);
  return hits.sort((a, b) => a.to - a.from - (b.to - b.from))[0]?.span;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough);
}

function clock(seconds, step) {
  if (seconds < 60 || step < 1) return `${Number(seconds.toFixed(Math.max(0, -Math.floor(Math.log10(step)))))} s`;
  const [minutes, rest] = [Math.floor(seconds / 60), Math.floor(seconds % 60)];
  const text = `${minutes % 60}`.padStart(2, "0") + ":" + `${rest}`.padStart(2, "0");
  return minutes >= 60 ? `${Math.floor(minutes / 60)}:${text}` : text;
}

const WHY = { wait_for_groups: "for groups", wait_for_publish: "for the publish before", wait_for_devices: "for shared devices" };

function drawWaits() {
  const { waits } = time.spans;
  if (!waits.length) return byId("waits").replaceChildren();
  const head = el("tr", {}, ...["seconds", "step", "the trainer waited", "until this group came", "at"].map((name) => el("th", {}, name)));
  const rows = waits.map((wait) => el("tr", {},
    el("td", { className: "n" }, number(wait.end - wait.begin, 3)), el("td", { className: "n" }, number(wait.step)), el("td", {}, WHY[wait.name] || wait.name),
    el("td", {}, wait.uid ? el("a", { href: `#/samples?uid=${encodeURIComponent(wait.uid)}&run=${time.run}` }, shown(wait.uid)) : "–"),
    el("td", { className: "n" }, `${number(wait.begin, 5)} s`)));
  byId("waits").replaceChildren(el("h2", {}, "The longest waits of this time"), el("div", { className: "card" }, el("table", {}, head, ...rows)));
}

function refreshTime() {
  return time.follows && !RECORDED ? loadTime() : null;
}
