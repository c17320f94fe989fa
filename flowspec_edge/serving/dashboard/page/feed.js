// What the cluster does, from /live: hands events on, says when they stop, and tries again.

import { askKey, headers } from "./key.js";
import { events } from "./sse.js";

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 8;
const SILENCE_S = 5;  // the server says something every second

/** For ever: `on[name](data)` for every event, `on.cut(why)` when there are none any more. */
export async function watch(on) {
  for (let pause = FIRST_PAUSE_S; ; pause = Math.min(2 * pause, LONGEST_PAUSE_S)) {
    let why = "the server has ended the connection";
    try {
      for await (const { name, data } of stream()) {
        pause = FIRST_PAUSE_S;
        if (data) on[name]?.(JSON.parse(data));
      }
    } catch (error) {
      why = error instanceof TypeError ? "the server cannot be reached" : error.message;
    }
    on.cut(why);
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
  }
}

async function* stream() {
  const gaveUp = new AbortController();
  let response;
  while ((response = await fetch("/live", { headers: headers(), signal: gaveUp.signal })).status === 401) {
    await askKey();
  }
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => gaveUp.abort(new Error("the server has fallen silent")), SILENCE_S * 1000);
  };
  try {
    heard();
    for await (const event of events(response.body)) {
      heard();
      yield event;
    }
  } finally {
    clearTimeout(timer);
  }
}
