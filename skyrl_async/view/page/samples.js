// Every sample of the runs: a table to sort, filter and search; a group side by side; one sample turn by turn with each token's numbers.
"use strict";

const HEIGHT = 28;
const NEWEST = 100000; // samples of a run that the table has; a page of all samples of a long run would take gigabytes
const versionsOf = (s) => (s.first_version === null ? "" : s.first_version === s.last_version ? `${s.first_version}` : `${s.first_version}–${s.last_version}`);
const COLUMNS = [
  { name: "run", width: "minmax(80px, 1fr)", of: (s) => runName(s.run), several: true },
  { name: "uid", width: "minmax(166px, 2fr)", of: (s) => shown(s.uid) },
  { name: "reward", width: "74px", of: (s) => number(s.reward), by: (s) => s.reward, n: true },
  { name: "outcome", width: "100px", of: (s) => el("span", { className: `pill ${s.outcome}` }, s.outcome), by: (s) => s.outcome },
  { name: "step", width: "56px", of: (s) => s.step, n: true },
  { name: "sample", width: "78px", of: (s) => (s.branch ? `${s.sample} / ${s.branch}` : s.sample), by: (s) => s.sample, n: true },
  { name: "advantage", width: "102px", of: (s) => number(s.advantage, 3), by: (s) => s.advantage, n: true },
  { name: "staleness", width: "94px", of: (s) => number(s.staleness), by: (s) => s.staleness, n: true },
  { name: "versions", width: "88px", of: versionsOf, by: (s) => s.first_version, n: true },
  { name: "tokens", width: "90px", of: (s) => number(s.num_tokens), by: (s) => s.num_tokens, n: true },
  { name: "turns", width: "66px", of: (s) => number(s.num_turns), by: (s) => s.num_turns, n: true },
  { name: "seconds", width: "86px", of: (s) => number(s.seconds, 3), by: (s) => s.seconds, n: true },
  { name: "engine", width: "minmax(90px, 1fr)", of: (s) => shown(s.engines || ""), by: (s) => s.engines },
  { name: "reason", width: "minmax(120px, 2fr)", of: (s) => (s.is_truncated && !s.reason ? "truncated" : shown(s.reason || "")), by: (s) => s.reason },
];
// Figures between two bounds; a sample of several versions has a range of its own.
const RANGES = {
  reward: (s) => [s.reward, s.reward], tokens: (s) => [s.num_tokens, s.num_tokens], step: (s) => [s.step, s.step],
  staleness: (s) => [s.staleness, s.staleness], version: (s) => [s.first_version, s.last_version],
};
const STACKED = 1100; // pixels up to which a sample is below the table, as in the style sheet
const browse = { samples: [], restarts: [], sorted: { by: "row", down: true }, visible: [], found: null, searched: [], cut: new Set(), chosen: null, mode: "version", isSide: false };

function buildSamples() {
  const changed = later(120, () => filterRows());
  const input = (id, placeholder, size) => el("input", { id, placeholder, ariaLabel: placeholder, size, oninput: changed });
  const words = el("input", { id: "words", type: "search", placeholder: "words in the text, Enter", ariaLabel: "words in the text", size: 24 });
  words.addEventListener("change", () => findWords());
  words.addEventListener("search", () => findWords());
  byId("samples").append(
    el("div", { className: "bar" },
      el("select", { id: "of-run", ariaLabel: "run", onchange: changed }),
      el("select", { id: "of-outcome", ariaLabel: "outcome", onchange: changed }, el("option", { value: "" }, "every outcome")),
      input("of-uid", "uid or reason", 18), words,
      el("details", { className: "bar ranges", open: innerWidth > 700 }, el("summary", {}, "figures"),
        ...Object.keys(RANGES).map((name) => el("label", {}, name, input(`${name}-from`, "from", 3), input(`${name}-to`, "to", 3)))),
      el("button", { onclick: clearFilters }, "clear"),
      el("span", { id: "num-rows", className: "soft", role: "status" })),
    el("div", { className: "browse", id: "browse" }, el("div", { className: "card rows", id: "rows", tabIndex: 0 }), el("div", { className: "detail", id: "detail" })),
  );
  byId("rows").addEventListener("scroll", () => requestAnimationFrame(drawRows));
  byId("rows").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !browse.visible.length) return;
    event.preventDefault();
    const at = browse.visible.indexOf(browse.chosen), next = browse.visible[Math.min(Math.max(at + step, 0), browse.visible.length - 1)];
    const top = browse.visible.indexOf(next) * HEIGHT, rows = byId("rows");
    if (top < rows.scrollTop || top > rows.scrollTop + rows.clientHeight - 3 * HEIGHT) rows.scrollTop = top - HEIGHT;
    choose(next);
  });
}

// One at a time: two would add the same rows.
function refreshSamples() {
  browse.refreshing ??= takeNewSamples().finally(() => { browse.refreshing = null; });
  return browse.refreshing;
}

async function takeNewSamples() {
  let isNew = false, problem = null;
  for (const [run, { end, num_restarts }] of overview.runs.entries()) {
    const have = browse.samples[run] ??= [];
    if (browse.restarts[run] !== num_restarts) have.length = 0; // the run went back to an earlier step: its rows were cut
    browse.restarts[run] = num_restarts;
    try {
      while (!have.length || have.at(-1).row + 1 < end) {
        const begin = have.length ? have.at(-1).row + 1 : Math.max(0, end - NEWEST);
        const columns = end ? await ask("samples", { run, begin }) : null;
        if (!columns?.row.length) break;
        addSamples(have, columns, run);
        isNew = true;
      }
    } catch (error) {
      problem ??= error; // the other runs are shown
    }
    if (have.length > 2 * NEWEST) have.splice(0, have.length - NEWEST);
  }
  if (isNew) {
    drawChoices();
    filterRows();
  }
  await searchNew();
  if (problem) throw problem;
}

function addSamples(have, columns, run) {
  const names = Object.keys(columns);
  columns.row.forEach((_, i) => {
    const sample = { run };
    for (const name of names) {
      const column = columns[name];
      sample[name] = column.codes ? (column.codes[i] === null ? null : column.texts[column.codes[i]]) : column[i];
    }
    have.push(sample);
  });
}

function drawChoices() {
  const run = byId("of-run"), outcome = byId("of-outcome"), before = [run.value, outcome.value];
  run.replaceChildren(el("option", { value: "" }, "every run"), ...overview.runs.map((_, i) => el("option", { value: i }, runName(i))));
  run.hidden = overview.runs.length < 2;
  const counts = {};
  for (const sample of browse.samples.flat()) counts[sample.outcome] = (counts[sample.outcome] || 0) + 1;
  outcome.replaceChildren(el("option", { value: "" }, "every outcome"),
    ...Object.entries(counts).map(([name, count]) => el("option", { value: name }, `${name} (${number(count)})`)));
  [run.value, outcome.value] = before;
}

async function findWords() {
  const words = byId("words").value;
  if (words === (browse.words || "")) return;
  setWords(words);
  if (words) byId("num-rows").textContent = "searching …";
  try {
    await searchNew();
    if (browse.words === words) filterRows();
  } catch (error) {
    if (browse.words !== words) return;
    byId("num-rows").textContent = "The search failed.";
    showProblem(error);
  }
}

function setWords(words) {
  Object.assign(browse, { words, found: words ? [] : null, searched: [], cut: new Set() });
}

// Search the rows that have not been searched, and show what is found in them.
async function searchNew() {
  const { words } = browse;
  if (!words) return;
  const searches = browse.samples.map(async (have, run) => {
    const end = have.length ? have.at(-1).row + 1 : 0, restarts = browse.restarts[run];
    const before = browse.searched[run]?.restarts === restarts ? browse.searched[run].end : 0;
    if (before === end) return false;
    const { rows, is_cut: isCut } = await ask("find", { run, words, begin: before });
    if (browse.words !== words) return false;
    browse.found[run] = new Set([...(before ? browse.found[run] : []), ...rows]);
    browse.searched[run] = { end, restarts };
    if (isCut) browse.cut.add(run);
    return true;
  });
  const ended = await Promise.allSettled(searches), failed = ended.find((one) => one.status === "rejected");
  if (ended.some((one) => one.value)) filterRows();
  if (failed) throw failed.reason;
}

function clearFilters() {
  for (const id of ["of-run", "of-outcome", "of-uid", "words", ...Object.keys(RANGES).flatMap((name) => [`${name}-from`, `${name}-to`])]) byId(id).value = "";
  setWords("");
  filterRows();
}

function filterRows() {
  const text = (id) => byId(id).value.trim();
  const bound = (id, without) => {
    const value = text(id) === "" ? without : Number(text(id));
    byId(id).ariaInvalid = Number.isNaN(value);
    return Number.isNaN(value) ? without : value;
  };
  const [run, outcome, uid] = [text("of-run"), text("of-outcome"), text("of-uid").toLowerCase()];
  const ranges = Object.entries(RANGES).map(([name, of]) => ({ of, low: bound(`${name}-from`, -Infinity), high: bound(`${name}-to`, Infinity) }))
    .filter(({ low, high }) => Number.isFinite(low) || Number.isFinite(high));
  const isInside = (s) => ranges.every(({ of, low, high }) => {
    const [first, last] = of(s);
    return first !== null && last >= low && first <= high;
  });
  browse.visible = browse.samples.flat().filter((s) =>
    (run === "" || s.run === Number(run)) && (!outcome || s.outcome === outcome) &&
    (!uid || s.uid.toLowerCase().includes(uid) || (s.reason || "").toLowerCase().includes(uid)) &&
    isInside(s) && (!browse.found || browse.found[s.run]?.has(s.row)));
  sortRows();
}

function sortRows() {
  const { by, down } = browse.sorted;
  const column = COLUMNS.find((one) => one.name === by), of = column ? column.by || column.of : (s) => s.row;
  const sign = down ? -1 : 1;
  browse.visible.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x === y) return sign * (a.row - b.row);
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return sign * (x < y ? -1 : 1);
  });
  const have = browse.samples.reduce((sum, of) => sum + of.length, 0), all = overview.runs.reduce((sum, run) => sum + run.num_rows, 0);
  byId("num-rows").textContent = `${number(browse.visible.length)} of ${have < all ? `the newest ${number(have)} of ` : ""}${number(all)} rows${RECORDED && browse.words ? `; the report has ${number(RECORDED.runs.reduce((sum, run) => sum + Object.keys(run.rows).length, 0))} texts to search` : ""}${browse.cut.size ? `; the words are also in older ones: only the newest ${number([...browse.cut].reduce((sum, run) => sum + browse.found[run].size, 0))} are found` : ""}`;
  drawRows();
}

function drawRows() {
  const place = byId("rows"), columns = COLUMNS.filter((column) => !column.several || overview.runs.length > 1);
  const widths = columns.map((column) => column.width).join(" ");
  const first = Math.max(0, Math.floor(place.scrollTop / HEIGHT) - 5), end = first + Math.ceil(innerHeight / HEIGHT) + 10;
  const minimum = `${columns.reduce((sum, column) => sum + Number(/\d+/.exec(column.width)[0]), 0)}px`;
  const cells = (column, child) => el("span", { className: column.n ? "n" : "" }, child);
  const head = el("div", { className: "row head", style: { "grid-template-columns": widths, "min-width": `max(100%, ${minimum})`, position: "sticky" } },
    ...columns.map((column) => el("span", {
      className: column.n ? "n" : "", role: "columnheader",
      onclick: () => {
        browse.sorted = { by: column.name, down: browse.sorted.by === column.name ? !browse.sorted.down : true };
        sortRows();
      },
    }, column.name + (browse.sorted.by === column.name ? (browse.sorted.down ? " ↓" : " ↑") : ""))));
  const rows = browse.visible.slice(first, end).map((sample, i) =>
    el("div", {
      className: sample === browse.chosen ? "row on" : "row", title: shown(sample.reason || ""),
      style: { top: `${(first + i + 1) * HEIGHT}px`, "grid-template-columns": widths, "min-width": `max(100%, ${minimum})` },
      onclick: () => choose(sample),
    }, ...columns.map((column) => cells(column, column.of(sample)))));
  place.replaceChildren(head, el("div", { style: { height: `${browse.visible.length * HEIGHT}px` } }), ...rows);
}

// From another view: #/samples?run=0&uid=..., or &row=...
async function openSamples(query) {
  if (!query.has("uid") && !query.has("row")) return;
  await refreshSamples().catch(showProblem);
  clearFilters();
  byId("of-uid").value = query.get("uid") || "";
  filterRows();
  const run = Number(query.get("run") || 0);
  const chosen = browse.visible.find((s) => s.run === run && (!query.has("uid") || s.uid === query.get("uid")) && (!query.has("row") || s.row === Number(query.get("row"))));
  if (chosen) choose(chosen);
}

const ofGroup = (a, b) => a.run === b.run && a.uid === b.uid && a.epoch === b.epoch && a.scheduled_version === b.scheduled_version && (a.epoch !== null || a.step === b.step);

function choose(sample) {
  browse.chosen = sample;
  byId("browse").classList.add("open");
  drawRows();
  drawDetail();
  if (innerWidth <= STACKED) byId("detail").scrollIntoView();
}

function drawDetail() {
  const sample = browse.chosen, detail = byId("detail");
  const group = browse.samples[sample.run].filter((other) => ofGroup(other, sample));
  const chip = (other) => el("button", { className: other === sample ? "on" : "", onclick: () => choose(other), title: other.outcome },
    `${other.sample}${other.branch ? ` / ${other.branch}` : ""}: ${number(other.reward, 3)}`);
  const listed = browse.isSide ? group : [sample];
  const modes = el("select", { id: "mode", ariaLabel: "colour tokens by", onchange: (e) => { browse.mode = e.target.value; drawDetail(); } });
  offerModes(modes, (key, mode) => !mode.column || key === browse.mode);
  Promise.allSettled(listed.map(loadSample)).then((rows) => {
    if (modes.isConnected) offerModes(modes, (_, mode) => !mode.column || rows.some(({ value }) => value && value[mode.column]));
  });
  const branches = group.filter((other) => other.sample === sample.sample);
  const tree = el("div", {}), body = el("div", { className: browse.isSide ? "side" : "" });
  detail.replaceChildren(
    el("h2", {}, shown(sample.uid), " ", el("span", { className: "soft" }, sample.epoch === null ? "held out" : `epoch ${sample.epoch}, scheduled at version ${sample.scheduled_version}`)),
    el("div", { className: "chips" }, ...group.map(chip),
      el("button", { className: browse.isSide ? "on" : "", onclick: () => { browse.isSide = !browse.isSide; drawDetail(); } }, "side by side")),
    el("div", { className: "bar" }, el("label", {}, "colour tokens by", modes), el("span", { id: "scale", className: "scale" })),
    tree, body,
  );
  const values = new Set(); // of the tokens of all that is shown
  for (const other of listed) {
    const card = el("div", { className: "card" }, figuresOf(other));
    body.append(card);
    loadSample(other).then((whole) => drawTurns(card, whole, values), (error) => card.append(el("p", { className: "soft" }, error.message)));
  }
  if (branches.length > 1) Promise.all(branches.map(loadSample)).then((rows) => drawTree(tree, rows), () => {});
}

// One at a time is kept, so that changing colours asks for nothing.
function loadSample(sample) {
  browse.kept ??= new Map();
  const key = `${sample.run}/${sample.row}/${browse.restarts[sample.run]}`;
  if (!browse.kept.has(key)) {
    const asked = ask("sample", { run: sample.run, row: sample.row });
    browse.kept.set(key, asked);
    asked.catch(() => browse.kept.delete(key)); // it is asked for again
  }
  if (browse.kept.size > 40) browse.kept.delete(browse.kept.keys().next().value);
  return browse.kept.get(key);
}

function figuresOf(sample) {
  const figures = {
    sample: sample.branch ? `${sample.sample}, branch ${sample.branch}` : sample.sample, step: sample.step, reward: sample.reward, "shaped reward": sample.shaped_reward,
    advantage: sample.advantage, staleness: sample.staleness, versions: versionsOf(sample) || null, tokens: sample.num_tokens,
    trained: sample.num_tokens === sample.num_sampled_tokens ? null : sample.num_sampled_tokens,
    aborts: sample.num_aborts || null, seconds: sample.seconds, engine: sample.engines,
  };
  return el("div", {},
    el("div", { className: "figures" }, el("span", { className: `pill ${sample.outcome}` }, sample.outcome), sample.is_truncated ? el("span", { className: "pill" }, "truncated") : null,
      ...Object.entries(figures).filter(([, value]) => value !== null).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, number(value))))),
    sample.reason ? el("p", { className: "error" }, shown(sample.reason)) : null);
}

// A choice that is no longer offered gives way to the first.
function offerModes(select, isOffered) {
  const offered = Object.entries(MODES).filter(([key, mode]) => isOffered(key, mode));
  select.replaceChildren(...offered.map(([key, mode]) => el("option", { value: key, selected: key === browse.mode }, mode.title)));
  if (select.value === browse.mode) return;
  browse.mode = select.value;
  drawDetail();
}

// Each mode: a token's value, and the colour of a value; null: none. One with a column is offered where a sample has it.
const hue = (h, strength = 1) => `hsl(${h} 70% var(--lightness) / ${strength})`;
const strong = (value, most) => Math.min(1, (Math.abs(value) / most) ** 0.4); // a root keeps small values visible
const diverging = (value, most) => (value === null ? "" : hue(value < 0 ? 8 : 215, strong(value, most))); // red: below zero, blue: above
const MODES = {
  version: { title: "policy version", of: (t) => t.version, color: (v) => (v === null ? "" : hue(versionHue(v))) },
  logprob: { title: "log-prob", of: (t) => t.logprob, color: (v) => (v === null ? "" : hue(40, strong(v, 3))), at: [-0.1, -1, -3] },
  gap: { title: "log-prob gap, trainer − engine", of: (t) => t.gap, color: (v) => diverging(v, 0.5), at: [-0.5, -0.1, 0.1, 0.5] },
  ratio: { title: "importance ratio", of: (t) => t.ratio, color: (v) => (v === null ? "" : diverging(Math.log(v), 0.5)), at: [0.6, 0.9, 1.1, 1.6] },
  advantage: { title: "advantage", of: (t) => t.advantage, color: (v) => diverging(v, 1.5), at: [1.5, 0.5, -0.5, -1.5] },
  teacher: { title: "teacher − engine, log-prob", column: "teacher_logprobs", of: (t) => (t.teacher === null ? null : t.teacher - t.logprob), color: (v) => diverging(v, 2), at: [1, 0.1, -0.1, -1, -2] },
  value: { title: "critic's value", column: "values", of: (t) => t.value, color: (v) => (v === null ? "" : hue(150, strong(v, 1))), at: [0.1, 0.5, 1] },
  weight: { title: "weight", column: "token_weights", of: (t) => t.weight, color: (v) => (v === null ? "" : hue(280, strong(v, 2))), at: [0, 0.5, 1, 2] },
  reward: { title: "reward", column: "token_rewards", of: (t) => t.reward, color: (v) => diverging(v, 1), at: [1, 0.1, -0.1, -1] },
  none: { title: "nothing", of: () => null, color: () => "" },
};

function tokensOf(whole) {
  const numPrompt = whole.prompt_token_ids.length;
  const versions = new Array(whole.response_token_ids.length).fill(null);
  for (const { version, start, end } of whole.policy_versions || []) if (version >= 0) versions.fill(version, start, end);
  const ids = whole.prompt_token_ids.concat(whole.response_token_ids);
  return ids.map((id, i) => {
    const at = i - numPrompt, isTrained = at >= 0 && whole.loss_mask[at];
    const logprob = at >= 0 && versions[at] !== null ? whole.logprobs[at] : null;
    const trainer = isTrained && whole.old_logprobs ? whole.old_logprobs[at] : null;
    const gap = trainer === null || logprob === null ? null : trainer - logprob;
    return {
      id, piece: whole.pieces ? whole.pieces[i] : "", version: at >= 0 ? versions[at] : null, isTrained, logprob, trainer, gap,
      ratio: gap === null ? null : Math.exp(gap), advantage: !isTrained ? null : whole.advantages ? whole.advantages[at] : whole.advantage,
      reference: isTrained && whole.ref_logprobs ? whole.ref_logprobs[at] : null, value: isTrained && whole.values ? whole.values[at] : null,
      teacher: isTrained && whole.teacher_logprobs ? whole.teacher_logprobs[at] : null,
      weight: isTrained && whole.token_weights ? whole.token_weights[at] : null, reward: isTrained && whole.token_rewards ? whole.token_rewards[at] : null,
    };
  });
}

const MOST_TOKENS = 4000;

function drawTurns(card, whole, values) {
  if (!whole.turns) {
    card.append(el("p", { className: "soft" }, whole.num_sampled_tokens === null ? "It has no tokens." : "Its text was not kept (trainer.samples.keep, trainer.samples.max_gb)."));
  }
  const tokens = whole.response_token_ids ? tokensOf(whole) : [], mode = MODES[browse.mode];
  for (const turn of whole.turns || []) {
    const text = el("div", { className: "text" });
    const known = [turn.role, turn.name, turn.tool_call_id, `${number(turn.end - turn.start)} tokens`, turn.engines?.join(", ")];
    if (turn.reward !== null) known.push(`reward ${number(turn.reward)}`);
    if (turn.engine_seconds !== null) known.push(`${number(turn.engine_seconds, 3)} s`);
    card.append(el("div", { className: `turn ${["assistant", "tool", "environment", "user", "system"].includes(turn.role) ? turn.role : ""}` },
      el("small", {}, shown(known.filter(Boolean).join(" · "))), text, ...turn.tool_calls.map(drawCall)));
    if (whole.pieces) fillTokens(text, tokens.slice(turn.start, turn.end), mode, 0);
    else text.textContent = shown(turn.text);
  }
  for (const [name, text] of Object.entries(JSON.parse(whole.logs || "{}"))) {
    card.append(el("details", {}, el("summary", {}, shown(name)), el("pre", {}, shown(text))));
  }
  if (whole.metrics) card.append(el("p", { className: "soft" }, `figures of the environment: ${shown(whole.metrics)}`));
  for (const value of tokens.map(mode.of)) if (value !== null) values.add(value);
  if (card.isConnected) drawScale(mode, values);
}

function drawCall(call) {
  let given = call.arguments || "";
  try {
    const object = JSON.parse(given);
    given = given.length > 80 ? JSON.stringify(object, null, 2) : given;
  } catch { /* a tool's input that is no JSON */ }
  return el("div", { className: "call" }, el("b", {}, shown(call.name)), el("code", {}, shown(given)), el("small", {}, shown(call.id || "")));
}

// A long turn is drawn in parts: a browser is slow with 100,000 elements.
function fillTokens(place, tokens, mode, first) {
  for (const token of tokens.slice(first, first + MOST_TOKENS)) {
    const node = el("span", { className: "token", style: { background: mode.color(mode.of(token)) } }, shown(token.piece));
    node.token = token;
    place.append(node);
  }
  if (!first) {
    place.addEventListener("pointermove", (event) => hintAt(event, event.target.token ? numbersOf(event.target.token) : ""));
    place.addEventListener("pointerleave", (event) => hintAt(event, ""));
  }
  const left = tokens.length - first - MOST_TOKENS;
  if (left > 0) {
    const more = el("button", { onclick: () => { more.remove(); fillTokens(place, tokens, mode, first + MOST_TOKENS); } }, `${number(left)} more tokens`);
    place.append(more);
  }
}

function numbersOf(token) {
  const lines = [`token ${token.id} ${JSON.stringify(shown(token.piece))}`];
  if (token.version === null) return [...lines, "not sampled"].join("\n");
  lines.push(`version ${token.version}${token.isTrained ? "" : ", not trained"}`, `behavior log-prob ${number(token.logprob)} (p ${number(Math.exp(token.logprob), 3)})`);
  if (token.trainer !== null) lines.push(`trainer's log-prob ${number(token.trainer)}`, `gap ${number(token.gap, 3)}, ratio ${number(token.ratio, 4)}`);
  if (token.reference !== null) lines.push(`reference log-prob ${number(token.reference)}`);
  if (token.teacher !== null) lines.push(`teacher's log-prob ${number(token.teacher)}`);
  if (token.value !== null) lines.push(`critic's value ${number(token.value)}`);
  if (token.advantage !== null) lines.push(`advantage ${number(token.advantage)}`);
  if (token.weight !== null) lines.push(`weight ${number(token.weight)}`);
  if (token.reward !== null) lines.push(`reward ${number(token.reward)}`);
  return lines.join("\n");
}

function drawScale(mode, values) {
  const scale = byId("scale");
  if (mode === MODES.none) scale.replaceChildren();
  else if (!values.size) scale.replaceChildren(["gap", "ratio"].includes(browse.mode) ? "No token has a value: it was not trained, or trainer.samples.keep=none." : "No token has a value.");
  else {
    const marks = mode.at || [...values].sort((a, b) => a - b).slice(0, 12);
    scale.replaceChildren(...marks.map((value) => el("span", { style: { background: mode.color(value) } }, browse.mode === "version" ? `version ${value}` : number(value))));
  }
}

// Branches of a rewritten history: each below the one with which it shares most tokens.
function drawTree(place, rows) {
  const tokens = rows.map((row) => row.response_token_ids && row.prompt_token_ids.concat(row.response_token_ids));
  if (tokens.some((of) => !of)) return;
  const lists = [];
  const roots = el("ul", { className: "tree" });
  rows.forEach((row, i) => {
    let [from, shared] = [-1, 0];
    for (let other = 0; other < i; other++) {
      let same = 0;
      while (same < tokens[i].length && tokens[i][same] === tokens[other][same]) same++;
      if (same > shared) [from, shared] = [other, same];
    }
    const turn = (row.turns || []).findIndex((t) => t.end > shared);
    const where = from < 0 ? "" : `, leaves branch ${rows[from].branch} at turn ${turn + 1} (token ${number(shared)})`;
    lists[i] = el("ul", { className: "tree" });
    const all = browse.samples[browse.chosen.run];
    const sample = all.find((one) => one.row === row.row);
    (from < 0 ? roots : lists[from]).append(el("li", {}, el("button", { className: sample === browse.chosen ? "on" : "", onclick: () => choose(sample) },
      `branch ${row.branch}: ${number(sample.num_tokens)} tokens${where}`), lists[i]));
  });
  place.replaceChildren(roots);
}
