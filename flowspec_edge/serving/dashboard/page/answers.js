// Asks the server as any client of the API would.

import { askKey, headers } from "./key.js";
import { events } from "./sse.js";

/** Ask with `body`; `onText(piece)` gets the text as it comes, `onThought(piece)` the reasoning before it,
 * `onNote(words)` what it waits for.  Resolves to its {usage, figures}, the token ids among the figures if asked
 * for; an Error says why there is none. */
export async function answer(body, { signal, onText, onNote, onThought = () => {} }) {
  const request = () => fetch(body.messages ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ stream: true, stream_options: { include_usage: true }, ...body }),
  });
  let response;
  while ((response = await request()).status === 401) await askKey();
  if (!response.ok) throw new Error((await response.json()).error.message);
  let usage = null, figures = {};
  for await (const { data, comment } of events(response.body)) {
    onNote(comment);
    if (data === "[DONE]") return { usage, figures };
    if (!data) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    figures = { ...figures, ...chunk.flowspec };
    const [choice] = chunk.choices;
    if (choice?.delta?.reasoning_content) onThought(choice.delta.reasoning_content);
    onText((body.messages ? choice?.delta?.content : choice?.text) ?? "");
  }
  throw new Error("the answer was cut off");
}

/** Why an answer ended, in words. */
export function why(error, signal) {
  if (signal.aborted) return "stopped";
  return error instanceof TypeError ? "The server cannot be reached." : `${error.message}.`;
}

/** Of an answer: "64 tokens, 12.1 a second". */
export function summary({ usage: { completion_tokens: tokens }, figures: { tokens_per_second: pace } }) {
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${pace ? `, ${pace.toFixed(1)} a second` : ""}`;
}
