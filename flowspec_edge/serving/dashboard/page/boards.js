// The boards as cards: what they have, how they are, how much they do.

const list = document.querySelector("#boards");
const machines = document.querySelector("#machines");
const title = document.querySelector("#pipeline-title");
const cards = new Map();  // by place
let names = [];  // by place

/** Make a card for every board of a `cluster` event, and mark those that are lost. */
export function showBoards({ boards }) {
  const told = JSON.stringify(boards.map(({ place, name, layers }) => [place, name, layers]));
  if (told !== list.dataset.told) {
    list.dataset.told = told;
    names = boards.map(({ name }) => name);
    cards.clear();
    list.replaceChildren(...boards.map(card));
  }
  for (const board of boards) {
    const { item, state, losses } = cards.get(board.place);
    item.toggleAttribute("data-lost", board.lost);
    state.textContent = board.lost ? "lost" : part(board);
    losses.textContent = board.losses && !board.lost
      ? `lost ${board.losses === 1 ? "once" : `${board.losses} times`}, for ${board.away_s.toFixed(1)} s` : "";
  }
}

/** Fill the cards from a `boards` event; what places on one machine share is shown once, above them. */
export function fillBoards({ boards }) {
  const hosts = new Map();  // the boards on each machine
  for (const board of boards) hosts.set(board.host, [...(hosts.get(board.host) ?? []), board]);
  const shared = [...hosts.values()].filter((places) => places.length > 1);
  const single = shared.length === 1 && hosts.size === 1;
  title.textContent = single ? "The boards: processes of one machine" : "The boards";
  machines.replaceChildren(...shared.map((places) => machine(places, single)));
  for (const board of boards) {
    const parts = cards.get(board.place);
    if (!parts) continue;
    const alone = hosts.get(board.host).length === 1;
    meter(parts.busy, board.busy, `${Math.round(100 * board.busy)} %`);
    fillMemory(parts.memory, board, alone);
    show(parts.facts, [
      ...(alone ? health(board) : []),
      `↓ ${size(board.bytes_in_s)}/s`,
      `↑ ${size(board.bytes_out_s)}/s`,
      `${Math.round(board.rows_s)} rows/s`,
    ]);
  }
}

/** A machine with several places; `single`: with all. */
function machine(places, single) {
  const [first] = places;
  const item = element("li", "", ""), memory = bar("memory", "memory"), facts = element("p", "facts", "");
  fillMemory(memory, first, true);
  show(facts, health(first));
  if (!single) item.append(element("b", "", `${listed(places.map(({ place }) => place))} share a machine`));
  item.append(memory, facts);
  return item;
}

const health = ({ temperature_c: celsius, watts, load }) => [
  celsius != null && `${Math.round(celsius)} °C`,
  watts != null && `${watts.toFixed(1)} W`,
  load != null && `load ${load.toFixed(1)}`,
];

/** The machine's memory, or only that of the board's process. */
function fillMemory(bar, { memory_total: total, memory_available: free, resident }, whole) {
  const taken = whole ? total && total - free : resident;
  const words = taken == null ? "unknown" : whole ? share(taken, total) : size(taken);
  meter(bar, taken && total ? taken / total : 0, words);
}

function show(facts, words) {
  facts.replaceChildren(...words.filter(Boolean).map((fact) => element("span", "", fact)));
}

/** What a board does. */
function part({ place, layers }) {
  if (place === 0) return "drafts, verifies";
  return `layers ${layers[0]}–${layers[1] - 1}`;
}

function card(board) {
  const head = element("h3", "", board.name), item = element("li", "", "");
  const parts = { item, state: element("span", "", ""), busy: bar("busy", "busy"), memory: bar("memory", "memory"),
    facts: element("p", "facts", ""), losses: element("p", "losses", "") };
  cards.set(board.place, parts);
  head.append(parts.state);
  item.dataset.place = board.place;
  item.append(head, parts.busy, parts.memory, parts.facts, parts.losses);
  return item;
}

function bar(kind, label) {
  const whole = element("div", `meter ${kind}`, "");
  whole.setAttribute("role", "meter");
  whole.setAttribute("aria-label", label);
  const line = element("span", "", label);
  line.append(element("b", "", ""));
  whole.append(line, element("i", "", ""));
  return whole;
}

function meter(bar, share, text) {
  bar.style.setProperty("--share", share);
  bar.setAttribute("aria-valuenow", Math.round(100 * share));
  bar.setAttribute("aria-valuetext", text);
  bar.querySelector("b").textContent = text;
}

/** Places in words: "D0, V1 and V3", or neighbours as "V1–V4". */
function listed(places) {
  const last = places.at(-1);
  if (places.length > 2 && last - places[0] === places.length - 1) return `${names[places[0]]}–${names[last]}`;
  return `${places.slice(0, -1).map((place) => names[place]).join(", ")} and ${names[last]}`;
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
