// The runs of the broker; two that are chosen are compared.

import { answered, byId, cell, duration, row } from "./elements.js";

const HEAD = ["", "run", "state", "started", "time", "steps", "domains", "model", "seed", "success sampled", "success greedy"];
const chosen = new Set();

const number = (value) => (value === undefined ? "-" : value.toFixed(2));
const pair = (results, name) => (`success_end${name}` in results || `success_start${name}` in results ? `${number(results[`success_start${name}`])} \u2192 ${number(results[`success_end${name}`])}` : "-");

function choice(run) {
  const box = document.createElement("input");
  box.type = "checkbox";
  box.value = run;
  box.setAttribute("aria-label", `compare ${run}`);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run);
    else chosen.delete(run);
    byId("compare").disabled = chosen.size !== 2;
  });
  return box;
}

function link(run) {
  const made = cell("a", run);
  made.href = `${encodeURIComponent(run)}/`;
  return made;
}

function rowOf(each) {
  const time = each.ended_ms === null ? "" : duration(each.ended_ms - each.started_ms);
  return row("td", [
    choice(each.run),
    link(each.run),
    cell("span", each.ended || "no end yet", `phase ${each.ended}`),
    new Date(each.started_ms).toLocaleString(),
    time,
    String(each.steps),
    each.domains.join(", "),
    each.model,
    String(each.seed),
    pair(each.results, ""),
    pair(each.results, "_greedy"),
  ]);
}

async function show() {
  try {
    const runs = await answered("../api/runs");
    byId("runs").replaceChildren(row("th", HEAD), ...runs.map(rowOf));
  } catch (error) {
    byId("connection").textContent = error.message;
  }
}

byId("compare").addEventListener("click", () => {
  const query = [...chosen].map((run) => `run=${encodeURIComponent(run)}`).join("&");
  location.href = `../compare/?${query}`;
});
show();
