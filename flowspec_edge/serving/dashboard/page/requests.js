// The requests that share the stages, side by side, and those that wait for a place.

import { colourName } from "./rail.js";

const section = document.querySelector("#requests");
const together = document.querySelector("#together");
const rows = document.querySelector("#requests tbody");

/** Show a `figures` event; one request alone has its figures below. */
export function showRequests({ requests, queue, waiting, together: all }) {
  section.hidden = requests.length + waiting < 2;
  if (section.hidden) return;
  together.textContent = words(all, requests[0]);
  const cut = waiting - queue.length;
  rows.replaceChildren(...requests.map(runs), ...queue.map(waits),
    ...(cut > 0 ? [row([`and ${cut} more`])] : []));
}

function words({ tokens_per_second: pace, fairness }, oldest) {
  if (!pace || !oldest) return "";
  const spread = fairness == null ? "" : `; the slowest has ${percent(fairness)} of the fastest one's`;
  return `Together ${number(pace)} tokens a second${spread}. The figures below are those of request ${oldest.number}.`;
}

function runs(request) {
  const { session, priority, tokens, tokens_per_second: pace, ttft_s: first, share } = request;
  const dot = document.createElement("i");
  dot.className = "dot";
  dot.style.setProperty("--colour", `var(--${colourName(session)})`);
  const name = row([`${request.number}${ranked(priority)}`, tokens, number(pace), seconds(first),
    seconds(request.itl_p50_s), seconds(request.itl_p95_s), seconds(request.itl_p99_s), percent(share)]);
  name.firstChild.prepend(dot);
  return name;
}

function waits({ ahead, waited_s: waited, priority }) {
  const next = ahead ? `${ahead} before it` : "next";
  return row([`waits${ranked(priority)}`, `${next}, for ${seconds(waited)}`]);
}

/** Cells of a row; the last one reaches to the end. */
function row(cells) {
  const made = document.createElement("tr");
  cells.forEach((text, i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    if (i === cells.length - 1) cell.colSpan = 8 - i;
    cell.textContent = text;
    made.append(cell);
  });
  return made;
}

const ranked = (priority) => (priority ? `, priority ${String(priority).replace("-", "−")}` : "");
const number = (value) => (value == null ? "–" : value.toFixed(value < 100 ? 1 : 0));
const percent = (value) => (value == null ? "–" : `${Math.round(100 * value)} %`);
const seconds = (value) => (value == null ? "–"
  : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`);
