// Server-sent events out of a fetch: EventSource can send no headers, and so no key.

/** Yields {name, data, comment} for every event of a response's body; a comment alone has no data. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        yield parsed(text.slice(0, end));
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // what was cut cannot be cancelled
  }
}

function parsed(block) {
  const event = { name: "message", data: "", comment: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
    else if (line.startsWith(": ")) event.comment = line.slice(2);
  }
  return event;
}
