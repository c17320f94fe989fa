// The figures, and how often guesses were right.

import { title } from "./settings.js";

const at = (id) => document.querySelector(`#${id}`);

/** What stays the same while the server runs. */
export function explainFigures({ stages }) {
  at("unguessed").textContent =
    `${stages} ${stages === 1 ? "board makes" : "boards make"} ${(1 / stages).toFixed(2)} tokens`;
}

/** Show a `figures` event. */
export function showFigures(figures) {
  put("tokens_per_second", figures.tokens_per_second, (n) => [n.toFixed(n < 100 ? 1 : 0)]);
  put("ttft_s", figures.ttft_s, (s) => (s < 1 ? [Math.round(1000 * s), "ms"] : [s.toFixed(1), "s"]));
  put("alt", figures.alt, (n) => [n.toFixed(2)]);
  put("alr", figures.alr, (n) => [n.toFixed(2)]);
  put("joules_per_token", figures.joules_per_token, (joules) => [joules.toFixed(2), "J"]);
  at("joules_per_token").parentElement.hidden = figures.joules_per_token == null;
  const { running, waiting, total } = figures;
  at("queue").textContent = `${running} running, ${waiting} waiting; answered: ${total.requests}, `
    + `${total.tokens} tokens`;
  at("guesses-of").textContent = figures.rounds_of
    ? `the last ${figures.rounds} of ${title(figures.rounds_of)}` : "no round has ended yet";
  showAcceptance(figures.acceptance, figures.rounds);
}

function put(id, value, words) {
  const [number, unit] = value == null ? ["–"] : words(value);
  at(id).textContent = number;
  if (unit) {
    const small = document.createElement("small");
    small.textContent = ` ${unit}`;
    at(id).append(small);
  }
}

function showAcceptance(shares, rounds) {
  const bars = at("acceptance");
  if (!rounds) bars.replaceChildren();
  while (bars.children.length < shares.length) {
    const column = document.createElement("span");
    column.append(document.createElement("i"), String(bars.children.length + 1));
    bars.append(column);
  }
  shares.forEach((share, i) => {
    bars.children[i].style.setProperty("--share", share);
    bars.children[i].title = `${i + 1} or more: ${Math.round(100 * share)} % of the last ${rounds} rounds`;
  });
  bars.setAttribute("aria-label", !rounds ? "No round has ended yet" : `At least one guess was right in ${Math.round(100 * shares[0])} percent of the `
    + `last ${rounds} rounds, at least three in ${Math.round(100 * shares[2])} percent`);
}
