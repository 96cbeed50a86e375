// Two runs over the same axes, and the figures of both reports.

import { draw, heldOut, line } from "./charts.js";
import { answered, byId, duration, row } from "./elements.js";

const SHADES = ["blue", "amber"];
const STEP = { x: { title: { text: "step", standoff: 4 }, rangemode: "tozero" } };
const VERSION = { x: { title: { text: "version", standoff: 4 }, rangemode: "tozero" }, y: { rangemode: "normal" } };
const MINUTES = { x: { title: { text: "minutes", standoff: 4 }, rangemode: "tozero" } };

const whole = (value) => value.toLocaleString("en-US");
const decimals = (value, digits = 2) => (value === null ? "not measured" : value.toFixed(digits));
const times = (value) => (value === null ? "not measured" : `${value.toFixed(2)}x`);
const small = (value) => (value === null ? "not measured" : value.toExponential(1));
const precise = (value) => (value === null || value === undefined ? "not measured" : Number(value.toPrecision(3)).toLocaleString("en-US"));
const change = (before, after) => `${decimals(before)} \u2192 ${decimals(after)}`;
// What was checked, too: groups that no auditor has compared are in no verdict.
const verdict = (each) => `${each.holds ? "held" : "DID NOT HOLD"}: ${each.checked}`;

const FIGURES = [
  ["end", (r) => r.reason || "no end yet"],
  ["time", (r) => duration(1000 * r.duration_s)],
  ["seed", (r) => String(r.seed)],
  ["success, sampled", (r) => change(r.success_start, r.success_end)],
  ["success, greedy", (r) => change(r.success_start_greedy, r.success_end_greedy)],
  ["steps", (r) => whole(r.steps)],
  ["samples", (r) => whole(r.samples)],
  ["episodes", (r) => whole(r.episodes)],
  ["tokens generated", (r) => whole(r.tokens_generated)],
  ["tokens trained", (r) => whole(r.tokens_trained)],
  ["tree saving, per request", (r) => times(r.merge_ratio_per_request)],
  ["tree saving, append-only", (r) => times(r.merge_ratio_append)],
  ["tree saving, attention", (r) => times(r.merge_ratio_attention)],
  ["largest staleness, its bound", (r) => `${r.staleness_max}, ${r.staleness_bound}`],
  ["groups", (r) => [...Object.entries(r.groups_retired).map(([reason, n]) => `${reason.replaceAll("_", " ")} ${whole(n)}`), `open ${whole(r.groups_open)}`].join(", ")],
  ["log-probability gap, mean", (r) => small(r.logprob_gap_mean)],
  ["log-probability gap, largest", (r) => small(r.logprob_gap_max)],
  ["yield J", (r) => precise(r.effective_yield?.value)],
  ["trained tokens/s", (r) => precise(r.effective_yield?.tokens_per_s)],
  ["reward gained per 1,000 samples", (r) => precise(r.effective_yield?.reward_gain)],
  ["alarms", (r) => String(r.alarms.length)],
  ...["G1", "G2", "G3", "G4", "G5"].map((name) => [name, (r) => verdict(r.guarantees_checked.find((each) => each.name === name))]),
];

function drawBoth(runs) {
  const each = (trace) => runs.map((run, i) => trace(run.state, SHADES[i]));
  const byVersion = (f) => (s, shade) => line(s.run, s.versions.map((v) => v.version), s.versions.map(f), shade);
  const byStep = (f, extra = {}) => (s, shade) => line(s.run, s.points.map((p) => p.step), s.points.map(f), shade, extra);
  const rounds = (s, shade) => ({ ...heldOut(s, false, shade), name: `${s.run}, held out` });
  draw("chart-success", [...each(byVersion((v) => v.tally.success)), ...each(rounds)], VERSION);
  draw("chart-reward", each(byVersion((v) => v.tally.reward)), VERSION);
  draw("chart-staleness", each((s, shade) => line(s.run, s.points.map((p) => p.step), s.points.map((p) => p.staleness_max), shade)), { ...STEP, y: { dtick: 1 } });
  draw("chart-rate", each((s, shade) => line(s.run, s.rates.map((r) => (r.time_ms - s.rates[0].time_ms) / 60000), s.rates.map((r) => r.tokens_per_s), shade)), MINUTES);
  draw("chart-saving", each(byStep((p) => p.request_tokens / Math.max(1, p.tree_tokens))), STEP);
  draw("chart-gap", each(byStep((p) => p.logprob_gap_mean, { connectgaps: true })), { ...STEP, y: { type: "log", exponentformat: "power" } });
}

function fill(runs) {
  const rows = FIGURES.map(([name, value]) => row("td", [name, ...runs.map((run) => value(run.report))]));
  byId("figures").replaceChildren(row("th", ["", ...runs.map((run) => run.state.run)]), ...rows);
}

async function show() {
  const names = new URLSearchParams(location.search).getAll("run").slice(0, 2);
  byId("run").textContent = names.join(" and ");
  if (names.length !== 2) {
    byId("connection").textContent = "choose two runs from all runs";
    return;
  }
  try {
    const runs = [];
    for (const name of names) runs.push(await answered(`../api/runs/${encodeURIComponent(name)}/compared`));
    document.title = `${names.join(" and ")} - ForgeMQ`;
    fill(runs);
    drawBoth(runs);
    const missing = runs.filter((run) => run.left_out).map((run) => `${run.state.run}: without what lies in the blob store (${run.left_out})`);
    byId("connection").textContent = missing.join("; ");
  } catch (error) {
    byId("connection").textContent = error.message;
  }
}

window.addEventListener("load", show);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
