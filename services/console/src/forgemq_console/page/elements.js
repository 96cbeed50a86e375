// Small parts of every page.

export const byId = (id) => document.getElementById(id);

export function cell(tag, value, className = "") {
  const made = document.createElement(tag);
  made.append(value);
  made.className = className;
  return made;
}

export function row(tag, values) {
  const made = document.createElement("tr");
  made.append(...values.map((each) => cell(tag, each)));
  return made;
}

// The parent has these children; those that are as before stay, so that a click, a selection or the
// keyboard's focus on one outlasts a refresh.
export function fill(parent, children) {
  const before = [...parent.children];
  children.forEach((child, i) => {
    if (!before[i]) parent.append(child);
    else if (!before[i].isEqualNode(child)) before[i].replaceWith(child);
  });
  before.slice(children.length).forEach((each) => each.remove());
}

// What the server answers, as data; a refusal is an error with the server's own words, and no answer
// within so many milliseconds one with the name TimeoutError.
export async function answered(address, { withinMs } = {}) {
  const answer = await fetch(address, withinMs ? { signal: AbortSignal.timeout(withinMs) } : {});
  if (!answer.ok) throw new Error((await answer.text()).trim() || String(answer.status));
  return answer.json();
}

export function duration(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  return `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, "0")}:${String(s % 60).padStart(2, "0")}`;
}
