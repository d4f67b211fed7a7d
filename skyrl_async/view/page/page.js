// Tabs, alarms, and the question every two seconds whether there is something new.
"use strict";

const TABS = {
  run: { title: "Run", refresh: refreshFigures, redraw: drawFigures },
  time: { title: "Time", refresh: refreshTime, redraw: drawTime, open: () => (time.spans ? drawTime() : follow()) },
  samples: { title: "Samples", refresh: refreshSamples, redraw: () => drawRows(), open: openSamples },
};
const PAUSE_MS = 2000, LIVE_S = 120;
let tab = "run";

function openTab() {
  const [name, query] = location.hash.slice(2).split("?");
  tab = name in TABS ? name : "run";
  for (const key of Object.keys(TABS)) byId(key).hidden = key !== tab;
  byId("tabs").replaceChildren(...Object.entries(TABS).map(([key, of]) => el("a", { href: `#/${key}`, className: key === tab ? "on" : "" }, of.title)));
  if (tab === "run") figures.seen = "";
  TABS[tab].open?.(new URLSearchParams(query || ""));
  refreshTab();
}

async function refreshTab() {
  const shownTab = tab;
  try {
    await TABS[tab].refresh();
    const damaged = overview.runs.filter((run) => run.error).map((run) => run.error);
    if (tab === shownTab) showProblem(damaged.length ? new Error(damaged.join("\n")) : null);
  } catch (error) {
    if (tab === shownTab) showProblem(error);
  }
}

function showProblem(error) {
  byId("problem").hidden = !error;
  byId("problem").textContent = !error ? "" : error instanceof TypeError && /fetch/.test(error.message) ? "The viewer has ended." : shown(error.message);
}

function drawHeader() {
  document.title = `${overview.runs.map((run) => run.name).join(", ")} – skyrl_async`;
  byId("runs").replaceChildren(...overview.runs.map((run, index) =>
    el("span", { className: "run", title: run.directory },
      overview.runs.length > 1 ? el("span", { className: "dot", style: { background: COLORS[index % COLORS.length] } }) : null,
      run.name, el("small", {}, `step ${number(run.step)} · ${number(run.num_rows)} rows of samples`))));
}

function drawAlarms() {
  const all = overview.runs.flatMap((run, index) => run.alarms.map((alarm) => ({ ...alarm, run: index })));
  const key = JSON.stringify(all);
  if (key === drawAlarms.key) return;
  drawAlarms.key = key;
  byId("alarms").replaceChildren(...all.map((alarm) =>
    el("div", { className: "alarm" },
      el("b", {}, overview.runs.length > 1 ? `${runName(alarm.run)}: ` : "", shown(alarm.says)), `, since step ${alarm.since_step} `,
      el("code", {}, alarm.metric), ". ", alarm.advice)));
}

async function watch() {
  const state = byId("state").firstChild;
  try {
    const found = await ask("overview");
    const isNew = JSON.stringify(found.runs.map((run) => run.name)) !== JSON.stringify(overview.runs.map((run) => run.name));
    overview = found;
    const quiet = Math.min(...overview.runs.map((run) => run.seconds_since ?? Infinity));
    state.textContent = RECORDED ? "report" : quiet < LIVE_S ? "live" : quiet < Infinity ? `written ${ago(quiet)}` : "stopped";
    drawHeader();
    drawAlarms();
    if (isNew) openTab();
    else if (!document.hidden) await refreshTab();
  } catch (error) {
    state.textContent = "stopped";
    showProblem(error);
  }
  if (!RECORDED) setTimeout(watch, PAUSE_MS);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* a file may not remember */ }
  TABS[tab].redraw();
}

function start() {
  let theme = null;
  try { theme = localStorage.getItem("theme"); } catch { /* the same */ }
  document.documentElement.dataset.theme = theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("state").append(el("span", {}, "…"),
    el("button", { onclick: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"), ariaLabel: "light or dark" }, "◐"));
  buildFigures();
  buildTime();
  buildSamples();
  addEventListener("hashchange", openTab);
  watch();
}

start();
