// Where every segment is at a moment, from what the feed tells of it: no drawing here.
//
// A place is a number: 0 is D0, i is Vi, N + 1 is D0 again.  Between two places a number has a fraction.

const KEPT_S = 6;  // how long what is over is remembered
const SILENT_S = 30;  // after which a segment that nothing is told of is forgotten
const HOP_S = 0.05;  // how long a way is taken to be, as long as nothing tells
const HOME_S = 0.3;  // and the way back, which is drawn long

/** Segments under way and what every place is busy with; all times are D0's. */
export class Journeys {
  constructor() {
    this.segments = new Map();
    this.spans = [];  // {place, start, end, kind, session}
    this.prunes = [];  // moments
  }

  /** Take in the events of a `flow` batch. */
  take(flow, now) {
    for (const event of flow) {
      const key = `${event.session}/${event.run}`;
      const segment = this.segments.get(key);
      switch (event.kind) {
        case "sent":
          this.segments.set(key, { session: event.session, run: event.run, rows: event.rows, sent: event.at,
            stops: [], returned: null, left: null, ended: Infinity });
          break;
        case "computed":
          this.spans.push({ place: event.place, start: event.start, end: event.end, kind: "computed",
            session: event.session });
          segment?.stops.push(event);
          segment?.stops.sort((a, b) => a.place - b.place);
          break;
        case "returned":
          if (!segment) break;
          Object.assign(segment, { returned: event.at, left: event.rows });
          this.#end(event.at, (one) => one.session === event.session && one.run < event.run);  // they keep their order
          break;
        case "ended":  // what is still under way is of no use any more, and not told of
          this.#end(event.at, (one) => one.session === event.session);
          break;
        case "lost":  // with a board all sessions are gone
          this.#end(event.at, () => true);
          break;
        case "pruned":
          this.prunes.push(event.at);
          break;
        case "draft":
        case "verify":
          this.spans.push({ place: 0, start: event.start, end: event.end, kind: event.kind,
            session: event.session });
          break;
      }
    }
    this.forget(now);
  }

  /** These do not come back. */
  #end(at, which) {
    for (const one of this.segments.values()) {
      if (one.returned === null && which(one)) one.ended = Math.min(one.ended, at);
    }
  }

  /** What has been over for long at a moment is forgotten. */
  forget(now) {
    for (const [key, segment] of this.segments) {
      const news = Math.max(segment.sent, ...segment.stops.map((stop) => stop.end));
      const last = segment.returned ?? Math.min(segment.ended, news + SILENT_S - KEPT_S);
      if (last < now - KEPT_S) this.segments.delete(key);
    }
    this.spans = this.spans.filter((span) => span.end > now - KEPT_S);
    this.prunes = this.prunes.filter((at) => at > now - KEPT_S);
  }

  /** {place, rows} of a segment at a moment, null when it is not under way; `stages` is N. */
  where(segment, at, stages) {
    if (at < segment.sent || at >= segment.ended) return null;
    const marks = waypoints(segment, stages);
    const home = marks.at(-1);
    if (segment.returned !== null && at >= home.at) return null;
    const after = marks.findIndex((mark) => mark.at > at);
    if (after < 0) {  // nothing is known of what comes next: on to the next place, and wait there
      const place = Math.min(stages, home.place + Math.min(1, (at - home.at) / HOP_S));
      return { place, rows: home.rows };
    }
    const before = marks[after - 1], next = marks[after];
    const share = (at - before.at) / Math.max(next.at - before.at, 1e-6);
    return { place: before.place + (next.place - before.place) * share, rows: before.rows };
  }

  /** What a place is busy with at a moment, or null. */
  busy(place, at) {
    return this.spans.find((span) => span.place === place && span.start <= at && at < span.end) ?? null;
  }
}

/** When it left and reached which place: [{at, place, rows}].  A way takes a little of the computing at its
 * ends, or one could not see it. */
function waypoints({ sent, rows, stops, returned, left }, stages) {
  const marks = [{ at: sent, place: 0, rows }];
  for (const stop of stops) {
    const eaten = Math.min(HOP_S, 0.3 * (stop.end - stop.start));
    marks.push({ at: Math.max(stop.start + eaten, marks.at(-1).at), place: stop.place, rows: stop.rows });
    marks.push({ at: Math.max(stop.end - eaten, marks.at(-1).at), place: stop.place, rows: stop.rows });
  }
  if (returned !== null) {
    if (!stops.length) marks.push({ at: returned, place: stages, rows });  // nobody told what came between
    marks.push({ at: Math.max(returned, marks.at(-1).at) + HOME_S, place: stages + 1, rows: left });
  }
  return marks;
}
