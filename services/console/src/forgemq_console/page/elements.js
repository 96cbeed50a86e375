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

// What the server answers, as data; a refusal is an error with the server's own words.
export async function answered(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error((await answer.text()).trim() || String(answer.status));
  return answer.json();
}

export function duration(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  return `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, "0")}:${String(s % 60).padStart(2, "0")}`;
}
