// The chat box: shows tokens as they come.

import { answer, summary, why } from "./answers.js";
import { markdown } from "./markdown.js";
import { race } from "./race.js";
import { offerSettings, racers, settings } from "./settings.js";

const CONTINUED = 256;  // tokens of a text that is continued
const CHAT_EXAMPLES = ["Why is the sky blue?", "Write a haiku about a pipeline", "What is 17 × 23?"];
const TEXT_EXAMPLES = ["def fibonacci(n):", "import os\n\ndef walk(path):", "class Stack:"];

const log = document.querySelector("#log");
const hint = document.querySelector("#hint");
const composer = document.querySelector("#composer");
const prompt = document.querySelector("#prompt");
const send = document.querySelector("#send");
const stop = document.querySelector("#stop");
const anew = document.querySelector("#new-chat");
let turns = [];  // of a chat: {role, content}
let model = null, usual = null, chats = false, running = null;

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();  // which checks the settings
  }
});
stop.addEventListener("click", () => running?.abort());
anew.addEventListener("click", () => {
  running?.abort();
  turns = [];
  log.replaceChildren(hint);
  hint.hidden = false;
  offerNew(false);
  prompt.focus();
});

/** Whether this page waits for an answer, or for the rest of one. */
export const asking = () => running !== null;

/** What is asked, from a `cluster` event. */
export function openChat(cluster) {
  if (model !== null) return;
  ({ model, chat: chats, strategy: usual } = cluster);
  document.querySelector("#chat-title").textContent = chats ? `Ask ${model}` : `Let ${model} continue a text`;
  anew.textContent = chats ? "New chat" : "New text";
  prompt.placeholder = chats ? "Ask something …" : "Begin a text …";
  offerSettings(cluster, chats ? null : CONTINUED);
  document.querySelector("#examples").append(...(chats ? CHAT_EXAMPLES : TEXT_EXAMPLES).map((example) => {
    const button = made("button", "", example.split("\n")[0]);
    button.type = "button";
    button.addEventListener("click", () => { prompt.value = example; composer.requestSubmit(); });
    return button;
  }));
}

async function ask() {
  const asked = chats ? prompt.value.trim() : prompt.value;
  if (!asked || running || model === null) return;
  hint.hidden = true;
  offerNew(true);
  prompt.value = "";
  const turn = made("div", chats ? "turn" : "turn text");
  turn.append(made("div", "asked", asked));
  log.append(turn);
  const own = turns, controller = new AbortController(), names = racers(usual);
  const body = { model, ...settings(),
    ...(chats ? { messages: [...turns, { role: "user", content: asked }] } : { prompt: asked }) };
  busy(turn, controller);
  const how = { signal: controller.signal, show };
  const answering = names ? race(names, body, turn, how) : single(body, turn, how);
  follow(true);  // to the lanes of a race
  const text = await answering;
  if (chats && text) own.push({ role: "user", content: asked }, { role: "assistant", content: text });
  busy(turn, null);
  follow(true);
}

/** Shows one answer, and before that what it waits for; resolves to what came of it. */
async function single(body, turn, { signal }) {
  const element = made("div", "answer"), note = made("p", "note"), thought = made("details", "thought");
  turn.append(thought, element, note);
  thought.append(made("summary", "", "Reasoning"), made("div", ""));
  thought.hidden = true;
  let whole = "";
  try {
    note.textContent = summary(await answer(body, {
      signal,
      onText(piece) { whole += piece; show(element, whole); },
      onThought(piece) { thought.hidden = false; thought.lastChild.append(piece); },
      onNote(words) { note.textContent = words; },
    }));
  } catch (error) {
    note.textContent = why(error, signal);
    note.classList.toggle("wrong", !signal.aborted);
  }
  return whole;
}

/** A chat's answer is Markdown; a text is what it is. */
function show(element, text) {
  const near = follows();
  if (chats) element.replaceChildren(markdown(text));
  else element.append(text.slice(element.textContent.length));
  follow(near);
}

function busy(turn, controller) {
  running = controller;
  turn.classList.toggle("busy", controller !== null);
  log.setAttribute("aria-busy", controller !== null);
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  if (controller) stop.focus({ preventScroll: true });
  else if (matchMedia("(pointer: fine)").matches) prompt.focus({ preventScroll: true });  // no keyboard pops up
}

/** Its place stays while it is not offered: the heading must not grow by it. */
function offerNew(offered) {
  anew.classList.toggle("away", !offered);
}

/** Whether the end of the log can be seen: who has scrolled up is left there. */
const follows = () => log.scrollHeight - log.scrollTop - log.clientHeight < 30;

function follow(wanted) {
  if (wanted) log.scrollTop = log.scrollHeight;
}

function made(tag, kind, text = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}
