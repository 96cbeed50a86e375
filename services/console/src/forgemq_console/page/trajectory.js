// One group's episodes: the tokens of every turn, sampled ones shaded by their probability.

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

let shown = { group: null, episode: null };

export async function showGroup(group, episode = null) {
  const asked = { group, episode };
  shown = asked;
  const query = episode ? `?episode=${encodeURIComponent(episode)}` : "";
  let found;
  try {
    const answer = await fetch(`api/groups/${encodeURIComponent(group)}${query}`);
    if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).slice(0, 200)}`);
    found = await answer.json();
  } catch (error) {
    if (shown === asked) showError(group, error);
    return;
  }
  if (shown !== asked) return; // Another one was chosen meanwhile.
  document.getElementById("trajectory-name").textContent = found.episode ? found.episode.episode_id : group;
  document.getElementById("episodes").replaceChildren(...found.episode_ids.map((id) => choice(found, id)));
  const turns = found.episode ? [...found.episode.messages.map(messageOf), ...found.episode.turns.map(turnOf)] : [element("p", { className: "hint", textContent: "No finished completion yet." })];
  const earned = found.episode ? [element("p", { className: "hint", textContent: earnedBy(found.episode.reward) })] : [];
  document.getElementById("trajectory").replaceChildren(...earned, ...turns);
}

function showError(group, error) {
  document.getElementById("trajectory-name").textContent = group;
  document.getElementById("episodes").replaceChildren();
  document.getElementById("trajectory").replaceChildren(element("p", { className: "hint", textContent: `Not read: ${error.message}` }));
}

export const shownGroup = () => shown.group;

function choice(found, id) {
  const isShown = found.episode && found.episode.episode_id === id;
  const label = id.split(".").slice(1).join(", attempt ");
  const button = element("button", { textContent: `episode ${label}`, className: isShown ? "chosen" : "" });
  button.addEventListener("click", () => showGroup(found.group_id, id));
  return button;
}

const signed = (value) => `${value < 0 ? "" : "+"}${Number(value.toPrecision(4))}`;

function earnedBy(reward) {
  if (!reward) return "not scored";
  const parts = ["outcome", "speed", "process", "total"].map((name) => `${name} ${Number(reward[name].toPrecision(4))}`).join(", ");
  const truncated = reward.truncated_by && `truncated by ${reward.truncated_by}`;
  return [reward.is_masked ? "masked" : parts, truncated, reward.detail].filter(Boolean).join("; ");
}

function messageOf(message) {
  const text = element("div", { className: "tokens", textContent: message.text });
  return element("article", { className: "turn" }, element("h3", { textContent: `${message.role} (imported)` }), text);
}

function turnOf(turn) {
  const versions = [...new Set(turn.output.map((t) => t.version))].join(", ");
  const head = [
    `turn ${turn.sequence}`,
    turn.parent_id ? `after ${turn.parent_id.slice(0, 8)}` : "root",
    `${turn.shared_prefix_tokens} shared + ${turn.context.length} new + ${turn.output.length} sampled tokens`,
    `T=${turn.temperature}`,
    `version ${versions}`,
    turn.finish_reason,
    turn.support === "full" ? "" : `support ${turn.support}: context, no loss`,
    `${turn.engine_s.toFixed(2)} s, ${turn.cached_tokens} cached`,
    turn.reward.process === null ? "" : `reward ${signed(turn.reward.process)}`,
    turn.reward.return_to_go === null ? "" : `return-to-go ${signed(turn.reward.return_to_go)}`,
    turn.reward.advantage === null ? "" : `advantage ${signed(turn.reward.advantage)}`,
  ].filter(Boolean).join(" | ");
  // After a cut the whole context is shown: what the policy saw from here on.
  const context = turn.seen.length ? turn.seen : turn.context;
  const tokens = element("div", { className: "tokens" }, ...context.map((t) => tokenOf(t, false)), ...turn.output.map((t) => tokenOf(t, true)));
  return element("article", { className: "turn" }, ...cutsBefore(turn), element("h3", { textContent: head }), tokens);
}

function cutsBefore(turn) {
  const fork = turn.fork_reason && !turn.cuts.length ? [`fork: ${turn.fork_reason}`] : [];
  return [...turn.cuts.map((cut) => cutText(cut, turn.seen.length)), ...fork].map((textContent) => element("p", { className: "cut", textContent }));
}

function cutText(cut, tokensAfter) {
  const by = cut.after_id ? cut.after_id.slice(0, 8) : "a turn that is not named";
  const who = cut.form === "tool" ? `called by ${by}` : `a rule, after ${by}`;
  const wrote = cut.is_written ? ", which wrote what is kept" : "";
  return `context cut by ${cut.function} ${cut.parameters} (${who}${wrote}): ${cut.tokens_before ?? "?"} tokens \u2192 ${tokensAfter || "?"}`;
}

function tokenOf(token, isSampled) {
  const made = element("span", { textContent: token.text, className: isSampled ? "sampled" : "context" });
  made.title = `id ${token.id}`;
  if (isSampled) {
    const probability = Math.exp(token.logprob);
    made.title += `\nlog p ${token.logprob.toFixed(4)} (p ${probability.toFixed(4)})\nversion ${token.version}`;
    const share = Math.round(12 + 60 * (1 - probability));
    made.style.background = `color-mix(in srgb, var(--amber) ${share}%, transparent)`;
  }
  return made;
}
