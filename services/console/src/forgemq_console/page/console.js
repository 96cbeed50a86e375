// Polls the state once a second and draws it. Everything shown comes from /api.

import { drawCharts } from "./charts.js";
import { answered, byId, cell, duration, fill } from "./elements.js";
import { showGroup, shownGroup } from "./trajectory.js";

const POLL_MS = 1000;
const ANSWER_MS_MAX = 10000;
const SILENT_MS = 5000;
const ALARMS_SHOWN_MAX = 50;
const SOURCES = { import: "imported", live: "live" };
const POSITIONS = { playing: "playing", complete: "scored", ready: "tree ready", scheduled: "scheduled", trained: "trained", retired: "retired untrained" };

function text(id, value) {
  const node = byId(id);
  if (node.textContent !== value) node.textContent = value;
}

function table(id, head, rows) {
  const top = document.createElement("tr");
  top.append(...head.map((each) => cell("th", each)));
  const body = rows.map((row) => {
    const made = document.createElement("tr");
    made.append(...row.cells.map((each) => cell("td", each)));
    if (row.group) {
      made.className = row.group === shownGroup() ? "choice chosen" : "choice";
      made.tabIndex = 0;
      made.addEventListener("click", () => showGroup(row.group));
      made.addEventListener("keydown", (event) => event.key === "Enter" && showGroup(row.group));
    }
    return made;
  });
  fill(byId(id), [top, ...body]);
}

function number(value, label, isBad = false) {
  const made = cell("div", cell("b", value), isBad ? "number bad" : "number");
  made.append(cell("span", label));
  return made;
}

function numbers(state) {
  const last = state.versions.at(-1)?.tally;
  const bound = Math.max(...state.queues.map((q) => q.staleness_limit));
  const trained = state.points.length > 0;
  const guessed = state.acceptance.at(-1);
  const gap = state.points.findLast((p) => p.logprob_gap_mean !== null);
  const made = state.effective_yield;
  const digits = (value) => (value === null ? "-" : Number(value.toPrecision(3)).toLocaleString("en-US"));
  const whole = (value) => value.toLocaleString("en-US");
  byId("numbers").replaceChildren(
    number(`${state.steps_trained} / ${state.steps}`, "steps trained"),
    ...(state.stage ? [number(`${state.stage.index + 1} / ${state.stage.count}`, `stage, from step ${state.stage.from_step}: ${state.stage.shares.map((s) => `${s.domain} ${Number(s.share.toFixed(4))}`).join(", ")}`)] : []),
    number(last ? last.success.toFixed(2) : "-", "success, newest version"),
    number(last ? last.reward.toFixed(2) : "-", "reward, newest version"),
    number(whole(Math.round(state.tokens_per_s)), "tokens/s sampled"),
    number(whole(state.tokens_generated), "tokens sampled"),
    number(whole(state.tokens_trained), "tokens trained"),
    number(`${state.staleness_max} / ${bound}`, "largest staleness / bound", state.staleness_max > bound),
    number(trained ? `${state.merge_ratio_per_request.toFixed(2)}x` : "-", "tree saving, per request"),
    number(trained ? `${state.merge_ratio_append.toFixed(2)}x` : "-", "tree saving, append-only"),
    number(state.episode_ends.map((e) => whole(e.episodes)).join(" + ") || "0", `episodes ${state.episode_ends.map((e) => e.end).join(" + ")}`.trim()),
    number(whole(state.forks.reduce((sum, f) => sum + f.forks, 0)), "forks"),
    number(gap === undefined ? "-" : gap.logprob_gap_mean.toExponential(1), gap === undefined ? "log-probability gap: not measured" : `nats gap to the engine, step ${gap.step}`),
    number(digits(made.value), "J: trained tokens/s x reward gained per 1,000 samples"),
    number(digits(made.tokens_per_s), "trained tokens/s"),
    number(digits(made.reward_gain), "reward gained per 1,000 samples"),
    number(digits(made.reward_slope), "the same, newest 10 versions"),
    number(digits(made.grad_norm_variance), "gradient variance, newest 10 steps"),
    number(digits(made.capped_share), "capped share, newest 10 steps"),
    number(digits(made.policy_age_steps), "policy age in steps, newest 10 steps"),
    ...(guessed ? [number(guessed.length.toFixed(2), `tokens a pass, version ${guessed.version}`)] : []),
    number(String(state.alarms.length), "alarms", state.alarms.length > 0),
    number(String(state.groups_open), "groups in flight"),
    number(state.retired.map((r) => `${r.groups}`).join(" + ") || "0", state.retired.map((r) => r.reason.replace("_", " ")).join(" + ") || "retired"),
  );
}

function queueOf(queue, made = cell("div", "", "queue")) {
  const title = cell("h2", queue.domain);
  title.append(cell("small", `head ${queue.head ?? "-"} | window ${queue.window} | ${queue.in_flight} of ${queue.slots} slots | ${queue.waiting} waiting | ${queue.groups_per_step} groups a step | bound ${queue.staleness_limit} steps`));
  const places = made.querySelector(".window") ?? cell("div", "", "window");
  fill(places, queue.positions.map(placeOf));
  fill(made, [title, places]);
  return made;
}

function placeOf(position) {
  const made = cell("button", String(position.queue_index), `place ${position.position}`);
  if (position.is_in_window) made.classList.add("in-window");
  const small = { playing: `${position.episodes_finished}/${position.group_size}`, retired: position.reason.replace("_", " ") };
  made.append(cell("i", small[position.position] ?? POSITIONS[position.position] ?? ""));
  made.title = `${position.group_id}\n${POSITIONS[position.position] ?? position.position} ${position.reason}`;
  made.addEventListener("click", () => showGroup(position.group_id));
  return made;
}

function queues(state) {
  const legend = cell("div", "", "legend");
  for (const [name, label] of Object.entries(POSITIONS)) {
    const item = cell("span", cell("span", "", `place ${name}`));
    item.append(label);
    legend.append(item);
  }
  const item = cell("span", cell("span", "", "place in-window"));
  item.append("inside the window");
  legend.append(item);
  const before = byId("queues").querySelectorAll(".queue");
  fill(byId("queues"), [...state.queues.map((queue, i) => queueOf(queue, before[i])), legend]);
}

function dot(kind, label) {
  const made = cell("span", cell("span", "", `dot ${kind}`));
  made.append(label);
  return made;
}

function tables(state) {
  const age = (ms) => `${Math.max(0, (state.now_ms - ms) / 1000).toFixed(0)} s ago`;
  table("engines", ["lane", "version", "running", "queued", "weights came", "paused"], state.engines.map((e) => {
    const isSilent = state.now_ms - e.reported_ms > SILENT_MS && !state.ended;
    const kind = !e.is_serving || isSilent ? "off" : "";
    return { cells: [dot(kind, `lane ${e.lane}`), `${e.version}`, `${e.running}`, `${e.queued}`, e.path || "-", `${e.paused_s.toFixed(2)} s`] };
  }));
  table("services", ["service", "records", "last record"], state.services.map((s) => {
    const kind = state.now_ms - s.last_ms > 30000 && !state.ended ? "quiet" : "";
    return { cells: [dot(kind, s.service), s.records.toLocaleString("en-US"), age(s.last_ms)] };
  }));
  table("alarms", ["step", "metric", "value", "threshold"], state.alarms.slice(-ALARMS_SHOWN_MAX).reverse().map((a) => ({
    cells: [dot("off", `${a.step}`), a.metric, a.value.toPrecision(3), `${a.side} ${a.threshold}`],
  })));
  table("forks", ["reason", "forks", "of episodes", "meaning"], state.forks.map((f) => ({
    cells: [f.reason.replace("_", " "), f.forks.toLocaleString("en-US"), `${(100 * f.episodes_share).toFixed(1)}%`, f.meaning],
  })));
  table("rounds", ["round", "weights", "played", "success", "reward"], state.evaluations.map((e) => ({
    cells: [
      e.round_name,
      e.version_min === e.version_max ? `${e.version_max ?? "-"}` : `${e.version_min}-${e.version_max}`,
      `${e.groups_ended} of ${e.groups}`,
      e.tally.episodes ? e.tally.success.toFixed(3) : "-",
      e.tally.episodes ? e.tally.reward.toFixed(3) : "-",
    ],
  })));
}

function untrainedTable(name, rows) {
  byId(`${name}-part`).hidden = rows.length === 0;
  table(name, ["domain", "conversations", "scored", "with an outcome", "success"], rows.map((i) => ({
    cells: [
      i.domain,
      i.conversations.toLocaleString("en-US"),
      i.ended.toLocaleString("en-US"),
      i.tally.episodes.toLocaleString("en-US"),
      i.tally.episodes ? i.tally.success.toFixed(3) : "-",
    ],
  })));
}

function head(state) {
  document.title = `${state.run} ${state.steps_trained}/${state.steps} - ForgeMQ`;
  text("run", state.run);
  const phase = state.ended || (state.steps_trained >= state.steps ? "evaluating" : state.completions ? "running" : "starting");
  text("phase", phase);
  byId("phase").className = `phase ${phase}`;
  byId("progress").max = state.steps;
  byId("progress").value = state.steps_trained;
  text("elapsed", duration(state.now_ms - state.started_ms));
  const stall = state.stall;
  byId("stall").hidden = stall === null;
  text("stall", stall === null ? "" : `Waits for ${stall.waits_for}, for ${duration(state.now_ms - stall.since_ms)} (${stall.reason.replaceAll("_", " ")}). ${stall.detail}`);
}

let lastKey = "";

async function refresh() {
  const state = await answered("api/state", { withinMs: ANSWER_MS_MAX });
  text("connection", "");
  head(state);
  numbers(state);
  queues(state);
  tables(state);
  untrainedTable("imported", state.imported);
  untrainedTable("live", state.live);
  // Curves cost the browser most, so they are drawn only when they changed.
  const key = JSON.stringify([state.points.length, state.versions, state.evaluations, state.rates.at(-1)]);
  if (key !== lastKey && window.Plotly) {
    drawCharts(state);
    lastKey = key;
  }
}

async function refreshGroups() {
  const rows = await answered("api/groups", { withinMs: ANSWER_MS_MAX });
  table("groups", ["group", "index", "state", "step", "turns", "success"], rows.map((g) => ({
    group: g.group_id,
    cells: [
      g.group_id,
      g.queue_index === null ? (SOURCES[g.source] ?? (g.purpose || "-")) : String(g.queue_index),
      g.reason ? g.reason.replace("_", " ") : (POSITIONS[g.position] ?? g.position),
      g.step === null ? "-" : String(g.step),
      String(g.completions),
      g.success === null ? "-" : g.success.toFixed(2),
    ],
  })));
}

async function poll() {
  try {
    await Promise.all([refresh(), refreshGroups()]);
  } catch (error) {
    // A fetch without an answer is a TypeError or late; the others have the server's words.
    const isAway = error instanceof TypeError || error.name === "TimeoutError";
    text("connection", isAway ? "the console does not answer; retrying" : error.message);
    console.warn(error);
  }
  setTimeout(poll, POLL_MS);
}

// The page is at the console's root, and for each other run below runs/.
byId("all-runs").href = location.pathname.replace(/(\/runs\/[^/]+)?\/[^/]*$/, "/runs/");
window.addEventListener("load", poll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { lastKey = ""; });
