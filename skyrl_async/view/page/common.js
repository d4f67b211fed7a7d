// What every view uses: elements, questions to the server, numbers as text. Texts of samples only ever become text nodes.
"use strict";

const COLORS = ["#2f6db5", "#d9822b", "#3d9a6d", "#8e5bb5", "#c8504b", "#1f97a8", "#a3762f", "#7d8791"];
const RAW = document.getElementById("recorded");
const RECORDED = RAW && JSON.parse(RAW.textContent); // a report in one file brings its answers along

let overview = { runs: [], differences: [] };

function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, of] of Object.entries(value)) made.style.setProperty(key, of);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const versionHue = (version) => (version * 67 + 200) % 360; // the same in every view

const byId = (id) => document.getElementById(id);

async function ask(what, params = {}) {
  if (RECORDED) return fromReport(what, params);
  const answer = await fetch(`api/${what}?${new URLSearchParams(params)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function fromReport(what, { run = 0, begin, end, row, words } = {}) {
  if (what === "overview") return RECORDED.overview;
  const of = RECORDED.runs[run];
  if (what === "series") return of.series;
  if (what === "samples") return begin > (of.samples.row.at(-1) ?? 0) ? null : of.samples;
  if (what === "spans") return { ...of.spans, begin: begin ?? of.spans.begin, end: end ?? of.spans.end };
  if (what === "sample") {
    if (!(row in of.rows)) throw new Error("The text of this sample is not in this report, which has the newest.");
    return of.rows[row];
  }
  const wanted = words.toLowerCase();
  const hits = Object.values(of.rows).filter((sample) => (sample.turns || []).some((t) => t.text.toLowerCase().includes(wanted)));
  return { rows: hits.map((sample) => sample.row), is_cut: false };
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Characters that are not seen, or that turn the reading order, as escapes.
function shown(text) {
  return text.replace(CONTROL, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function runName(run) {
  return overview.runs[run]?.name ?? "";
}

function showError(place, error) {
  place.replaceChildren(el("p", { className: "error" }, error.message));
}

function hintAt(event, text) {
  const hint = byId("hint");
  hint.hidden = !text;
  if (!text) return;
  hint.textContent = text;
  const { width, height } = hint.getBoundingClientRect();
  hint.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  hint.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

// How long ago something was, in words.
function ago(seconds) {
  const [length, unit] = [[86400, "days"], [3600, "h"], [60, "min"]].find(([of]) => seconds >= 2 * of) ?? [1, "s"];
  return `${Math.floor(seconds / length)} ${unit} ago`;
}

function later(milliseconds, action) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}
