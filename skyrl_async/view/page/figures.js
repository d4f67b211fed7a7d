// The figures of runs by step or by time: one small chart per question, all with one cursor and one zoom.
"use strict";

const SHARE = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 3)} %`);
// `needed`: shown only where a run has such a figure.
const PANELS = [
  { title: "Reward", lines: { "reward/mean": "training", "reward/eval": "held out" } },
  { title: "Staleness", unit: "steps", lines: { "async/staleness_mean": "mean", "async/staleness_max": "largest" }, zero: true },
  { title: "Waiting", unit: "share of the step", shows: SHARE, zero: true,
    lines: { "trainer/idle_frac": "trainer", "stage/generate/waiting_for_output_frac": "generation" } },
  { title: "Throughput", unit: "tokens/s", lines: { "generate/tokens_per_second": "sampled" }, zero: true },
  { title: "Answer length", unit: "tokens", zero: true,
    lines: { "generate/response_tokens_mean": "mean", "generate/response_tokens_max": "longest" } },
  { title: "Answers cut, failed, without a difference", unit: "share", shows: SHARE, zero: true,
    lines: { "generate/truncated_frac": "cut", "generate/failed_frac": "failed", "reward/zero_variance_frac": "no difference" } },
  { title: "Entropy", unit: "nats", lines: { "policy/entropy": "policy" }, zero: true },
  { title: "Tokens clipped or masked", unit: "share", shows: SHARE, zero: true,
    lines: { "policy/clip_frac": "clipped", "policy/correction_masked": "masked by corrections", "async/masked_frac": "masked for age" } },
  { title: "Effective sample size", unit: "share", shows: SHARE, lines: { "policy/ess": "tokens", "policy/sequence_ess": "rows" } },
  { title: "Log-prob gap, engine to trainer", unit: "nats",
    lines: { "policy/behavior_kl": "KL, all tokens", "policy/lag0_behavior_kl": "KL, newest version", "policy/lag0_logprob_gap_max": "largest, newest version" } },
  { title: "Gradient norm", lines: { "policy/grad_norm": "before clipping" }, zero: true },
  { title: "Divergence from the teacher", unit: "nats", needed: true, lines: { "policy/teacher_kl": "mean over tokens" } },
  { title: "Critic, explained variance", needed: true, lines: { "critic/explained_variance": "1: perfect, 0: constant" } },
  { title: "Critic, values", unit: "reward", needed: true, lines: { "critic/values_mean": "values", "critic/returns_mean": "returns" } },
  { title: "Seconds of a step", unit: "s", zero: true,
    lines: { "timing/step": "whole", "timing/forward_backward": "gradients", "timing/wait_for_groups": "waiting for groups", "timing/wait_for_staleness": "holding the bound" } },
  { title: "Publishing weights", unit: "s", lines: { "timing/publish": "whole", "timing/pause": "engines paused" }, zero: true },
];

const figures = { charts: [], byTime: false, smooth: true, series: [], extra: [], seen: "", range: null };

function buildFigures() {
  const place = byId("run");
  const toggle = (name, label, changed) =>
    el("label", {}, el("input", { type: "checkbox", checked: figures[name], onchange: (e) => { figures[name] = e.target.checked; changed(); } }), label);
  const all = el("datalist", { id: "metrics" });
  const more = el("input", { list: "metrics", placeholder: "add a metric …", ariaLabel: "add a metric", size: 28 });
  more.addEventListener("change", () => {
    if (!overview.runs.some((run) => run.metrics.includes(more.value))) return;
    figures.extra.push({ title: more.value, lines: { [more.value]: "" } });
    more.value = "";
    loadFigures();
  });
  place.append(
    el("div", { className: "bar" }, toggle("byTime", "by time", () => zoomTo(null)), toggle("smooth", "moving average", drawFigures), more, all,
      el("button", { id: "whole", hidden: true, onclick: () => zoomTo(null) }, "whole run"),
      el("span", { className: "soft" }, "drag: zoom · double click: all")),
    el("div", { className: "panels" }),
    el("div", { id: "differences" }),
  );
}

function panelsNow() {
  const known = new Set(overview.runs.flatMap((run) => run.metrics));
  const lags = [...known].filter((name) => /^engine\/.*\/lag_steps$/.test(name)).slice(0, COLORS.length);
  const engines = { title: "Engines behind the trainer", unit: "steps", zero: true, lines: Object.fromEntries(lags.map((name) => [name, name.split("/")[1]])) };
  const panels = PANELS.filter(({ needed, lines }) => !needed || Object.keys(lines).some((name) => known.has(name)));
  return [...panels, ...(lags.length ? [engines] : []), ...figures.extra];
}

async function loadFigures() {
  const names = panelsNow().flatMap((panel) => Object.keys(panel.lines)).join();
  const { range, byTime } = figures;
  const within = range && { by: byTime ? "time_s" : "step", begin: range.min, end: range.max };
  figures.series = await Promise.all(overview.runs.map(({ has_means, num_lines }, run) => !num_lines ? {} : ask("series", { run, names, ...(has_means ? within : null) })));
  byId("metrics").replaceChildren(...[...new Set(overview.runs.flatMap((run) => run.metrics))].map((value) => el("option", { value })));
  drawFigures();
  drawDifferences();
}

function refreshFigures() {
  const seen = JSON.stringify(overview.runs.map((run) => [run.num_restarts, run.num_lines]));
  if (seen === figures.seen) return null;
  figures.seen = seen;
  return loadFigures();
}

// One drag is reported by every chart, as they share a cursor. A long run has means; their detail is asked for.
const zoomTo = later(20, (range) => {
  figures.range = range;
  byId("whole").hidden = !range;
  return overview.runs.some((run) => run.has_means) && !RECORDED ? loadFigures() : drawFigures();
});

// An exponential moving average, corrected for its start.
function smoothed(values, weight = 0.7) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function linesOf(panel) {
  const found = [];
  figures.series.forEach((series, run) => {
    Object.entries(panel.lines).forEach(([name, label], index) => {
      if (!series[name]?.some((value) => value !== null)) return;
      const several = overview.runs.length > 1;
      found.push({
        run, name, values: series[name], x: figures.byTime ? series.time_s : series.step,
        label: label || name,
        color: COLORS[(several ? run : index) % COLORS.length],
        dash: several && index ? [[6, 3], [2, 3], [8, 3, 2, 3]][(index - 1) % 3] : [],
        isSparse: series[name].filter((value) => value !== null).length < series[name].length / 2,
      });
    });
  });
  return found;
}

function drawFigures() {
  for (const chart of figures.charts) chart.destroy();
  figures.charts = [];
  byId("run").querySelector(".panels").replaceChildren(...panelsNow().map(drawPanel));
}

function drawPanel(panel) {
  const lines = linesOf(panel);
  const card = el("div", { className: "card panel" }, el("h3", {}, panel.title, el("small", {}, panel.unit || "")));
  const legend = el("div", { className: "legend" });
  const place = el("div", {});
  card.append(legend, place);
  if (!lines.length) {
    legend.textContent = "not logged";
    return card;
  }
  const style = getComputedStyle(document.documentElement);
  const [soft, grid] = [style.getPropertyValue("--soft"), style.getPropertyValue("--line")];
  const series = [{}];
  const tables = [];
  const shownLines = [];
  for (const line of lines) {
    const isSmooth = figures.smooth && !line.isSparse && line.values.length > 3;
    const columns = isSmooth ? [line.values, smoothed(line.values)] : [line.values];
    tables.push([line.x, ...columns]);
    if (isSmooth) series.push({ stroke: line.color + "66", width: 1, spanGaps: true, points: { show: false } });
    series.push({ stroke: line.color, width: 2, dash: line.dash, spanGaps: true, points: { show: line.isSparse || line.values.length < 2, size: 6, fill: line.color } });
    shownLines.push({ ...line, index: series.length - (isSmooth ? 2 : 1) }); // the legend has the values as they are
  }
  const data = uPlot.join(tables.map(inOrder));
  const show = (chart) => {
    const at = chart.cursor.idx;
    const parts = new Map();
    for (const line of shownLines) {
      const values = data[line.index];
      const value = at === null || at === undefined ? lastOf(values) : near(values, at);
      if (!parts.has(line.label)) parts.set(line.label, el("span", {}));
      parts.get(line.label).append(el("i", { style: { "--of": markerOf(line) }, title: runName(line.run) }, el("b", {}, (panel.shows || number)(value))), " ");
    }
    legend.replaceChildren(...[...parts].map(([label, part]) => { part.append(label); return part; }));
  };
  const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
  requestAnimationFrame(() => {
    const chart = new uPlot({
      width: place.clientWidth || 380, height: 170, series, legend: { show: false },
      cursor: { sync: { key: "figures", scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 5 },
        bind: { dblclick: () => () => zoomTo(null) } },
      scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, panel.zero) } },
      axes: [
        { ...axis, size: 30, values: (_, ticks) => ticks.map((tick) => (figures.byTime ? duration(tick) : number(tick))) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (panel.shows || number)(tick)) },
      ],
      hooks: {
        ready: [show], setCursor: [show],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 0) zoomTo({ min: u.posToVal(left, "x"), max: u.posToVal(left + width, "x") });
        }],
      },
    }, data, place);
    if (figures.range) chart.setScale("x", figures.range);
    chart.place = place;
    figures.charts.push(chart);
  });
  return card;
}

// The line as the legend shows it, with its dashes.
function markerOf({ color, dash }) {
  if (!dash.length) return color;
  let at = 0;
  const parts = dash.map((length, i) => `${i % 2 ? "transparent" : color} ${at}px ${(at += length)}px`);
  return `repeating-linear-gradient(90deg, ${parts.join(", ")})`;
}

// A run that went on from an earlier step has times that go back; a chart wants them ascending.
function inOrder(table) {
  const known = [...table[0].keys()].filter((i) => table[0][i] !== null);
  const order = known.sort((a, b) => table[0][a] - table[0][b]).filter((i, n, all) => !n || table[0][i] !== table[0][all[n - 1]]);
  return table.map((column) => order.map((i) => column[i]));
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

// The value at a place, or the last one before it.
function near(values, at) {
  for (let i = at; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

function rangeOf(low, high, fromZero) {
  if (low === null || low === undefined || (fromZero && !low && !high)) return [0, 1];
  const bottom = fromZero ? Math.min(0, low) : low;
  const room = 0.08 * (high - bottom || Math.abs(high) || 1);
  return [fromZero ? bottom : bottom - room, high + room];
}

function duration(seconds) {
  if (seconds < 120) return `${number(seconds, 3)} s`;
  return seconds < 7200 ? `${number(seconds / 60, 3)} min` : `${number(seconds / 3600, 3)} h`;
}

function drawDifferences() {
  if (overview.runs.length < 2) return;
  const head = el("tr", {}, el("th", {}, "key"), ...overview.runs.map((_, run) => el("th", {}, runName(run))));
  const rows = overview.differences.map(({ key, values }) =>
    el("tr", {}, el("td", {}, key), ...values.map((value) => el("td", {}, value === null ? "–" : String(value)))));
  const what = rows.length ? el("div", { className: "card" }, el("table", {}, head, ...rows)) : el("p", { className: "soft" }, "The configurations are equal.");
  const unread = overview.runs.filter((run) => !run.has_settings).map((run) => run.name);
  const left = unread.length ? el("p", { className: "error" }, `config.yaml cannot be read, and is not compared: ${unread.join(", ")}`) : null;
  const tasks = overview.differences.find(({ key }) => key === "task.name");
  const apart = tasks ? el("p", { className: "error" }, `The runs have different tasks (${tasks.values.join(", ")}): their rewards and lengths do not compare.`) : null;
  byId("differences").replaceChildren(el("h2", {}, "What differs between the configurations"), ...[left, apart].filter(Boolean), what);
}

addEventListener("resize", later(150, () => {
  for (const chart of figures.charts) if (chart.place.clientWidth) chart.setSize({ width: chart.place.clientWidth, height: 170 });
}));
