// Two strategies, one after the other, on the same prompt with the same seed: they share the pipeline, and at
// once each would slow the other down.

import { answer, summary, why } from "./answers.js";
import { title } from "./settings.js";

const SEEDS = 2 ** 32;

/** Run `names` one after the other with the fields of `body`, in lanes of `turn`.  `show(element, text)` shows
 * an answer so far; resolves to the last text, null if not all have ended. */
export async function race(names, body, turn, { signal, show }) {
  const seed = Math.floor(Math.random() * SEEDS);
  const lanes = names.map((name) => lane(turn, title(name)));
  const verdict = made(turn, "p", "verdict"), runs = [];
  for (const [i, strategy] of names.entries()) {
    const { element, note, text } = lanes[i];
    let whole = "";
    element.classList.add("busy");
    try {
      runs.push(await answer({ ...body, seed, flowspec: { strategy, tokens: true } }, {
        signal,
        onText(piece) { whole += piece; show(text, whole); },
        onNote(words) { note.textContent = words; },
      }));
      note.textContent = summary(runs[i]);
      note.classList.add("pace");
    } catch (error) {
      note.textContent = why(error, signal);
      note.classList.toggle("wrong", !signal.aborted);
      return null;
    } finally {
      element.classList.remove("busy");
    }
    runs[i].text = whole;
    compare(lanes, runs);
  }
  verdict.textContent = `${faster(names, runs)}${same(runs)}`;
  verdict.dataset.same = String(runs.every((run) => difference(runs[0], run) < 0));
  return runs.at(-1).text;
}

const pace = (run) => run.figures.tokens_per_second ?? 0;

/** Bars as long as the speeds. */
function compare(lanes, runs) {
  const fastest = Math.max(...runs.map(pace));
  runs.forEach((run, i) => lanes[i].element.style.setProperty("--share", fastest ? pace(run) / fastest : 0));
}

function faster(names, [first, last]) {
  if (!pace(first) || !pace(last)) return "Too short to compare speeds. ";
  const ratio = pace(last) / pace(first);
  return `${title(names.at(-1))} has ${ratio.toFixed(2)} times the speed of ${title(names[0])}. `;
}

/** Whether the texts are the same, token by token. */
function same([first, last]) {
  const at = difference(first, last), { temperature } = first.figures;
  const how = temperature ? `at temperature ${temperature} with one seed` : "at temperature 0";
  if (at < 0) return `The texts are identical ${how}: the same ${count(first.figures.tokens.length)}.`;
  return `The texts differ ${how}, from token ${at + 1} on (in 16 bits near ties may do that).`;
}

/** The first token in which two answers differ; -1: none. */
function difference({ figures: { tokens: one } }, { figures: { tokens: other } }) {
  const at = one.findIndex((token, i) => token !== other[i]);
  return at < 0 && other.length > one.length ? one.length : at;
}

const count = (tokens) => `${tokens} ${tokens === 1 ? "token" : "tokens"}`;

function lane(turn, name) {
  const element = made(turn, "div", "lane");
  const head = made(element, "p", "head");
  made(head, "b", "").textContent = name;
  const note = made(head, "span", "note");
  made(element, "i", "");
  return { element, note, text: made(element, "div", "answer") };
}

function made(parent, tag, kind) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  parent.append(element);
  return element;
}
