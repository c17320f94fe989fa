// The boards as cards: what they have, how they are, how much they do.

const list = document.querySelector("#boards");
const cards = new Map();  // by place

/** Make a card for every board of a `cluster` event. */
export function showBoards(cluster) {
  list.replaceChildren(...cluster.boards.map((board) => card(board, cluster)));
}

/** Fill the cards from a `boards` event. */
export function fillBoards({ boards }) {
  for (const board of boards) {
    const parts = cards.get(board.place);
    if (!parts) continue;
    const total = board.memory_total, taken = total ? total - board.memory_available : 0;
    meter(parts.busy, board.busy, `${Math.round(100 * board.busy)} %`);
    meter(parts.memory, total ? taken / total : 0, total ? share(taken, total) : "unknown");
    const facts = [
      board.temperature_c != null && `${Math.round(board.temperature_c)} °C`,
      board.watts != null && `${board.watts.toFixed(1)} W`,
      board.load != null && `load ${board.load.toFixed(1)}`,
      `↓ ${size(board.bytes_in_s)}/s`,
      `↑ ${size(board.bytes_out_s)}/s`,
      `${Math.round(board.rows_s)} rows/s`,
    ];
    parts.facts.replaceChildren(...facts.filter(Boolean).map((fact) => element("span", "", fact)));
    const held = board.resident ? `; this process has ${size(board.resident)}` : "";
    parts.memory.title = board.memory_available ? `${size(board.memory_available)} are free${held}` : "";
  }
}

function card(board, cluster) {
  const own = board.place === 0 ? "drafts, verifies"
    : board.layers ? `layers ${board.layers[0]}–${board.layers[1] - 1}` : "a slice of all layers";
  const head = element("h3", "", board.name);
  head.append(element("span", "", own));
  const parts = { busy: bar("busy", "busy"), memory: bar("memory", "memory"), facts: element("p", "facts", "") };
  cards.set(board.place, parts);
  const item = element("li", "", "");
  item.dataset.place = board.place;
  item.setAttribute("aria-label", `${board.name}, ${own}, ${cluster.state}`);
  item.append(head, parts.busy, parts.memory, parts.facts);
  return item;
}

function bar(kind, label) {
  const whole = element("div", `meter ${kind}`, "");
  const line = element("span", "", label);
  line.append(element("b", "", ""));
  whole.append(line, element("i", "", ""));
  return whole;
}

function meter(bar, share, text) {
  bar.style.setProperty("--share", share);
  bar.querySelector("b").textContent = text;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** A count of bytes in words. */
function size(bytes) {
  const unit = unitOf(bytes);
  return `${digits(bytes / 1000 ** unit, unit)} ${UNITS[unit]}`;
}

/** The same for a part of a whole, in the whole's unit. */
function share(part, whole) {
  const unit = unitOf(whole);
  return `${digits(part / 1000 ** unit, unit)} of ${size(whole)}`;
}

function unitOf(bytes) {
  let unit = 0;
  for (let left = bytes; left >= 999.5 && unit < UNITS.length - 1; left /= 1000) unit += 1;
  return unit;
}

const digits = (number, unit) => (number >= 9.95 || !unit ? String(Math.round(number)) : number.toFixed(1));

function element(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}
