// Draws the curves with Plotly; colours come from the style sheet, so light and dark agree.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function layout(axes) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  return {
    margin: { l: 40, r: 12, t: 26, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("soft"), size: 11, family: "inherit" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("card"), font: { color: colour("ink") } },
    uirevision: "kept",
    xaxis: { ...axis, ...axes.x },
    yaxis: { ...axis, rangemode: "tozero", ...axes.y },
  };
}

export function line(name, x, y, shade, extra = {}) {
  return { name, x, y, mode: x.length > 1 ? "lines" : "markers", line: { color: colour(shade), width: 2 }, ...extra };
}

export function draw(id, traces, axes = {}) {
  Plotly.react(id, traces, layout(axes), { displayModeBar: false, responsive: true });
}

export function heldOut(state, isGreedy, shade = isGreedy ? "violet" : "blue") {
  const rounds = state.evaluations.filter((e) => e.is_greedy === isGreedy && e.tally.episodes);
  const name = isGreedy ? "held out, greedy" : "held out, sampled";
  const symbol = isGreedy ? "square" : "circle";
  return {
    ...line(name, rounds.map((e) => e.version_max), rounds.map((e) => e.tally.success), shade),
    mode: "lines+markers",
    marker: { size: 9, symbol, color: colour(shade) },
    line: { dash: "dot", color: colour(shade) },
  };
}

export function drawCharts(state) {
  const versions = state.versions.map((v) => v.version);
  draw("chart-learning", [
    line("success", versions, state.versions.map((v) => v.tally.success), "green"),
    line("reward", versions, state.versions.map((v) => v.tally.reward), "amber"),
    heldOut(state, false),
    heldOut(state, true),
  ], { x: { title: { text: "version", standoff: 4 }, rangemode: "tozero" }, y: { rangemode: "normal" } });
  const steps = state.points.map((p) => p.step);
  const each = (f) => state.points.map(f);
  draw("chart-staleness", [
    line("largest", steps, each((p) => p.staleness_max), "blue", { line: { shape: "hv", color: colour("blue"), width: 2 } }),
    line("bound", steps, each((p) => p.staleness_bound), "red", { line: { dash: "dash", color: colour("red") } }),
  ], { x: { title: { text: "step", standoff: 4 } }, y: { dtick: 1 } });
  draw("chart-saving", [
    line("per request", steps, each((p) => p.request_tokens / Math.max(1, p.tree_tokens)), "violet"),
    line("append-only", steps, each((p) => p.append_tokens / Math.max(1, p.tree_tokens)), "cyan"),
  ], { x: { title: { text: "step", standoff: 4 } } });
  draw("chart-rate", [
    line("tokens/s", state.rates.map((r) => new Date(r.time_ms)), state.rates.map((r) => r.tokens_per_s), "blue", { fill: "tozeroy" }),
  ]);
  const measured = state.points.filter((p) => p.logprob_gap_mean !== null);
  draw("chart-gap", [
    line("largest", measured.map((p) => p.step), measured.map((p) => p.logprob_gap_max), "red"),
    line("99 % within", measured.map((p) => p.step), measured.map((p) => p.logprob_gap_p99), "amber"),
    line("mean", measured.map((p) => p.step), measured.map((p) => p.logprob_gap_mean), "green"),
  ], { x: { title: { text: "step", standoff: 4 } }, y: { type: "log", exponentformat: "power" } });
  draw("chart-optimizer", [
    line("gradient norm", steps, each((p) => p.grad_norm), "amber"),
    line("entropy", steps, each((p) => p.entropy), "cyan"),
  ], { x: { title: { text: "step", standoff: 4 } } });
}
