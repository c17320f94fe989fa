// The figures, and how often guesses were right.

import { title } from "./settings.js";

const NO_ROUND = "no round has ended yet";

const at = (id) => document.querySelector(`#${id}`);

/** What stays the same while the server runs. */
export function explainFigures({ stages }) {
  at("unguessed").textContent =
    `${stages} ${stages === 1 ? "board makes" : "boards make"} ${(1 / stages).toFixed(2)} tokens`;
}

/** Whether there will be a figure of energy, from a `boards` event: only if every machine measures its power. Its
 * place is there before the first answer, and stays. */
export function expectEnergy({ boards }) {
  const measured = new Set(boards.filter(({ watts }) => watts != null).map(({ host }) => host));
  if (boards.every(({ host }) => measured.has(host))) at("joules_per_token").parentElement.hidden = false;
}

/** Show a `figures` event. */
export function showFigures(figures) {
  put("tokens_per_second", figures.tokens_per_second, (n) => [n.toFixed(n < 100 ? 1 : 0)]);
  put("ttft_s", figures.ttft_s, (s) => (s < 1 ? [Math.round(1000 * s), "ms"] : [s.toFixed(1), "s"]));
  put("alt", figures.alt, (n) => [n.toFixed(2)]);
  put("alr", figures.alr, (n) => [n.toFixed(2)]);
  put("joules_per_token", figures.joules_per_token, (joules) => [joules.toFixed(2), "J"]);
  const { running, waiting, total } = figures;
  at("queue").textContent = `${running} running, ${waiting} waiting; answered: ${short(total.requests)}, `
    + `${short(total.tokens)} tokens`;
  const rounds = figures.rounds === 1 ? "last round" : `last ${figures.rounds} rounds`;
  const whose = figures.rounds_of ? `the ${rounds} of ${title(figures.rounds_of)}` : "";
  at("guesses-of").textContent = whose || NO_ROUND;
  showAcceptance(figures.acceptance, whose);
}

/** A count in one line for ever: 613, 1.2K, 3.4M. */
const short = (count) => new Intl.NumberFormat("en", { notation: "compact" }).format(count);

function put(id, value, words) {
  const [number, unit] = value == null ? ["–"] : words(value);
  at(id).textContent = number;
  if (unit) {
    const small = document.createElement("small");
    small.textContent = ` ${unit}`;
    at(id).append(small);
  }
}

/** `whose`: the rounds in words; empty: there are none. */
function showAcceptance(shares, whose) {
  const bars = at("acceptance");
  if (!whose) bars.replaceChildren();
  while (bars.children.length < shares.length) {
    const column = document.createElement("span");
    column.append(document.createElement("i"), String(bars.children.length + 1));
    bars.append(column);
  }
  shares.forEach((share, i) => {
    bars.children[i].style.setProperty("--share", share);
    bars.children[i].title = `${i + 1} or more: ${Math.round(100 * share)} % of ${whose}`;
  });
  bars.setAttribute("aria-label", whose ? `At least one guess was right in ${Math.round(100 * shares[0])} percent of `
    + `${whose}, at least three in ${Math.round(100 * shares[2])} percent` : NO_ROUND);
}
