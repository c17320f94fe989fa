// Segments on their way: a line through all boards and back, above the cards or beside them.

import { cleared, colour, isStill, painter } from "./canvas.js";
import { Journeys } from "./journeys.js";

const BEHIND_S = 0.35;  // what is shown is so old: a stage tells of a segment when it is done with it
const QUIET_S = 3;  // after the last news nothing moves any more
const PULSE_S = 0.35;  // a prune's way along the boards
const BESIDE_S = 0.3;  // a session that was not heard of for so long is over, or nearly
const FORGOTTEN_S = 30;
const CELL = 4, GAP = 1, MOST_CELLS = 32;
const SESSION_COLOURS = ["sent", "other-1", "other-2", "other-3"];

const canvas = document.querySelector("#rail");
const journeys = new Journeys();
const sessions = new Map();  // {colour, seen}: those beside one another have colours of their own
let ahead = Infinity;  // this page's clock minus D0's, seconds
let newest = 0;  // this page's time of the last news
let stages = 0;
let lost = new Set();  // places

const wake = painter(paint);
new ResizeObserver(() => wake()).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => wake());

/** Which boards there are, from a `cluster` event. */
export function layRail(cluster) {
  stages = cluster.stages;
  lost = new Set(cluster.boards.filter((board) => board.lost).map(({ place }) => place));
  canvas.dataset.lost = [...lost].join(" ");
  wake();
}

/** What has moved, from a `flow` event. */
export function moveSegments({ at, events }) {
  newest = performance.now() / 1000;
  ahead = Math.min(ahead + 1e-4, newest - at);  // the fastest message's; yields, for clocks drift
  for (const { session } of events) {
    if (session === undefined) continue;  // of all
    const known = sessions.get(session) ?? { colour: freeColour(at) };
    sessions.set(session, { ...known, seen: at });
  }
  for (const [session, { seen }] of sessions) if (seen < at - FORGOTTEN_S) sessions.delete(session);
  journeys.take(events, at);
  wake();
}

/** Forget everything: D0's clock may be another one. */
export function clearRail() {
  ahead = Infinity;
  journeys.take([], Infinity);
  wake();
}

function paint(now) {
  const { draw, width, height } = cleared(canvas);
  if (!stages) return false;
  const line = geometry(width, height);
  const at = now - ahead - BEHIND_S;
  journeys.forget(at);
  drawLines(draw, line);
  for (let place = 0; place <= stages; place += 1) {
    if (lost.has(place)) drawLost(draw, line.at(place));
    else drawPlace(draw, line.at(place), journeys.busy(place, at));
  }
  if (!isStill()) for (const cut of journeys.prunes) drawPulse(draw, line, (at - cut) / PULSE_S);
  const met = new Map();  // how many stand at a place already
  for (const segment of journeys.segments.values()) {
    const where = journeys.where(segment, at, stages);
    if (!where) continue;
    const place = isStill() ? Math.round(where.place) : where.place;
    const before = met.get(Math.round(place)) ?? 0;
    met.set(Math.round(place), before + 1);
    const { x, y } = line.at(place);
    const aside = Number.isInteger(place) ? 6 * before : 0;  // those that wait stand behind the first
    drawSegment(draw, line, line.upright ? { x: x - aside, y } : { x, y: y - aside }, segment, where.rows);
  }
  canvas.dataset.segments = [...met.values()].reduce((sum, count) => sum + count, 0);
  canvas.setAttribute("aria-label", met.size ? "Segments are on their way through the boards"
    : "No segment is on its way");
  return now - newest < QUIET_S || met.size > 0;
}

/** Where places are on the canvas, along the cards: `at(place)` with a fraction between two places. */
function geometry(width, height) {
  const cards = [...document.querySelectorAll("#boards li")].map((card) => card.getBoundingClientRect());
  const own = canvas.getBoundingClientRect();
  const upright = height > width;
  const centres = cards.map((card) => (upright ? card.top - own.top + card.height / 2
    : card.left - own.left + card.width / 2));
  const forward = upright ? 26 : 58, back = upright ? 66 : 16;
  const last = centres.length - 1;
  const point = (along, across) => (upright ? { x: across, y: along } : { x: along, y: across });
  function at(place) {
    if (place <= last) {
      const before = Math.floor(place), after = Math.min(last, before + 1);
      return point(centres[before] + (centres[after] - centres[before]) * (place - before), forward);
    }
    // Home in three parts: across, along, across.
    const share = place - last;
    if (share < 0.15) return point(centres[last], forward + (back - forward) * (share / 0.15));
    if (share > 0.85) return point(centres[0], back + (forward - back) * ((share - 0.85) / 0.15));
    return point(centres[last] + (centres[0] - centres[last]) * ((share - 0.15) / 0.7), back);
  }
  return { at, point, upright, forward, back, first: centres[0], last: centres[last] };
}

function drawLines(draw, line) {
  draw.lineWidth = 2;
  draw.strokeStyle = colour("line");
  draw.beginPath();
  const corners = [[line.first, line.forward], [line.last, line.forward], [line.last, line.back],
    [line.first, line.back]].map(([along, across]) => line.point(along, across));
  for (const { x, y } of corners) draw.lineTo(x, y);
  draw.closePath();
  draw.stroke();
}

/** A ring where the line passes a board; filled while the board computes. */
function drawPlace(draw, { x, y }, span) {
  draw.beginPath();
  draw.arc(x, y, span ? 13 : 7, 0, 2 * Math.PI);
  draw.fillStyle = colour("panel");
  draw.fill();
  draw.lineWidth = span ? 3 : 2;
  draw.strokeStyle = !span ? colour("line") : span.kind === "computed" ? sessionColour(span.session)
    : colour(span.kind === "verify" ? "accepted" : "drafted");
  draw.stroke();
}

/** A cross instead of the ring. */
function drawLost(draw, { x, y }) {
  draw.strokeStyle = colour("pruned");
  draw.lineWidth = 3;
  draw.beginPath();
  for (const way of [1, -1]) {
    draw.moveTo(x - 7, y - 7 * way);
    draw.lineTo(x + 7, y + 7 * way);
  }
  draw.stroke();
}

function drawPulse(draw, line, share) {
  if (share < 0 || share > 1) return;
  const along = line.first + (line.last - line.first) * share;
  const { x, y } = line.point(along, line.forward + (line.upright ? -21 : 21));
  draw.fillStyle = colour("pruned");
  draw.beginPath();
  draw.ellipse(x, y, line.upright ? 2 : 9, line.upright ? 9 : 2, 0, 0, 2 * Math.PI);
  draw.fill();
}

/** One cell a row; those that were dropped on the way are empty. */
function drawSegment(draw, line, { x, y }, segment, rows) {
  const all = Math.min(segment.rows, MOST_CELLS), left = Math.min(rows, MOST_CELLS);
  const columns = Math.max(1, line.upright ? Math.min(4, all) : Math.ceil(all / 2));
  const lines = Math.ceil(all / columns);
  const step = CELL + GAP, wide = columns * step + 5, high = lines * step + 5;
  const corner = { x: x - wide / 2, y: y - high / 2 };
  draw.fillStyle = colour("panel");
  draw.strokeStyle = sessionColour(segment.session);
  draw.lineWidth = 1.5;
  draw.beginPath();
  draw.roundRect(corner.x, corner.y, wide, high, 4);
  draw.fill();
  draw.stroke();
  for (let i = 0; i < all; i += 1) {
    draw.fillStyle = i < left ? sessionColour(segment.session) : colour("line");
    draw.fillRect(corner.x + 3 + (i % columns) * step, corner.y + 3 + Math.floor(i / columns) * step, CELL, CELL);
  }
}

/** The first that no session beside it has. */
function freeColour(at) {
  const taken = [...sessions.values()].filter(({ seen }) => seen > at - BESIDE_S).map((session) => session.colour);
  return SESSION_COLOURS.find((name) => !taken.includes(name)) ?? SESSION_COLOURS[0];
}

function sessionColour(session) {
  return colour(colourName(session));
}

/** The name in style.css of the colour of a session's segments. */
export function colourName(session) {
  return sessions.get(session)?.colour ?? SESSION_COLOURS[0];
}
