// The chat box: asks as any client of the API would, and shows tokens as they come.

import { askKey, headers } from "./key.js";
import { events } from "./sse.js";

const CONTINUED = 256;  // tokens of a text that is continued
const CHAT_EXAMPLES = ["Why is the sky blue?", "Write a haiku about a pipeline", "What is 17 × 23?"];
const TEXT_EXAMPLES = ["def fibonacci(n):", "import os\n\ndef walk(path):", "class Stack:"];

const log = document.querySelector("#log");
const hint = document.querySelector("#hint");
const prompt = document.querySelector("#prompt");
const send = document.querySelector("#send");
const stop = document.querySelector("#stop");
const turns = [];  // of a chat: {role, content}
let model = null, chats = false, running = null;

document.querySelector("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
stop.addEventListener("click", () => running?.abort());

/** What is asked, from a `cluster` event. */
export function openChat(cluster) {
  if (model !== null) return;
  ({ model, chat: chats } = cluster);
  document.querySelector("#chat-title").textContent = chats ? `Ask ${model}` : `Let ${model} continue a text`;
  prompt.placeholder = chats ? "Ask something …" : "Begin a text …";
  document.querySelector("#examples").append(...(chats ? CHAT_EXAMPLES : TEXT_EXAMPLES).map((example) => {
    const button = made("button", "", example.split("\n")[0]);
    button.type = "button";
    button.addEventListener("click", () => { prompt.value = example; ask(); });
    return button;
  }));
}

async function ask() {
  const asked = chats ? prompt.value.trim() : prompt.value;
  if (!asked || running || model === null) return;
  hint.hidden = true;
  prompt.value = "";
  const turn = made("div", chats ? "turn" : "turn text");
  const answer = made("div", "answer"), note = made("p", "note");
  turn.append(made("div", "asked", asked), answer, note);
  log.append(turn);
  follow(true);
  busy(turn, new AbortController());
  try {
    note.textContent = summary(await stream(asked, answer, note));
  } catch (error) {
    const stopped = running.signal.aborted;
    note.textContent = stopped ? "stopped" : words(error);
    note.classList.toggle("wrong", !stopped);
  }
  if (chats && answer.textContent) {
    turns.push({ role: "user", content: asked }, { role: "assistant", content: answer.textContent });
  }
  busy(turn, null);
  follow(true);
}

/** Shows the answer as it comes, and before that what it waits for; resolves to its `usage`. */
async function stream(asked, answer, note) {
  const body = chats ? { messages: [...turns, { role: "user", content: asked }] }
    : { prompt: asked, max_tokens: CONTINUED };
  const request = () => fetch(chats ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", signal: running.signal, headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ model, stream: true, stream_options: { include_usage: true }, ...body }),
  });
  let response;
  while ((response = await request()).status === 401) await askKey();
  if (!response.ok) throw new Error((await response.json()).error.message);
  let usage = null;
  for await (const { data, comment } of events(response.body)) {
    note.textContent = comment;
    if (data === "[DONE]") return usage;
    if (!data) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const [choice] = chunk.choices;
    const near = follows();
    answer.append((chats ? choice?.delta?.content : choice?.text) ?? "");
    follow(near);
  }
  throw new Error("the answer was cut off");
}

function summary({ completion_tokens: tokens, flowspec: { tokens_per_second: pace } }) {
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${pace ? `, ${pace.toFixed(1)} a second` : ""}`;
}

function words(error) {
  return error instanceof TypeError ? "The server cannot be reached." : `${error.message}.`;
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
