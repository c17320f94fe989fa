// The draft tree, drawn along the text: what became text stays as a line, what may come spreads from it.

import { cleared, colour, isStill, painter } from "./canvas.js";
import { title } from "./settings.js";
import { heights } from "./tree_layout.js";

const GONE_S = 1.1;  // how long a node that was cut can be seen
const LAYERS = ["pruned", "drafted", "sent", "accepted"];  // what is drawn over what
const FADED = 0.6;  // how strong it is in the beginning
const SPEED = 9;  // a second; larger is faster
const NARROW = 500;  // pixels
const WIDEST_COLUMN = 92, HIGHEST_ROW = 24, MARGIN = 22, LABEL = 12, LETTER = 0.61 * LABEL;  // pixels
const DOT = 5.7, LINE = 1.5;  // pixels: half of a node's size, and of a line's, at most
const PIECES = 8;  // of a line, when it is looked for behind a label

const canvas = document.querySelector("#tree");
const idle = document.querySelector("#tree-idle");
const nodes = new Map();  // by id: {x, y, to, text, state, score, since, seen, still}
let session = null;
let usual = { tree: true, state: "up" };  // the `cluster` event
let root = null, camera = 0, before = 0;
let row = HIGHEST_ROW, column = 60, level = 0;  // pixels; the level is the root's

const wake = painter(paint);
new ResizeObserver(() => wake()).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => wake());

/** What the server does unless a request says otherwise, from a `cluster` event. */
export function expectTree(cluster) {
  usual = cluster;
}

/** What is said while there is no tree, from a `figures` event; `asking`: whether this page waits for an answer. The
 * tree of an answer that has ended stays until the next one begins. */
export function explainTree({ requests, waiting }, asking) {
  idle.textContent = words(requests, waiting > 0 || asking);
  if (requests.length && root !== null && !requests.some((request) => request.session === session)) clearTree();
}

function words(requests, wanted) {
  if (requests.some((request) => request.tree)) return "An answer begins; its tree grows with the first guesses.";
  if (requests.length) return `${named(requests[0])} has no draft tree.`;
  if (usual.state !== "up") return "The boards are not ready; no answer goes on until they are.";
  if (wanted) return "An answer waits for its turn.";
  if (usual.tree) return "No answer is being made; the tree grows with the next one.";
  return `No answer is being made; ${named(usual)} has no draft tree.`;
}

function named({ strategy }) {
  const name = title(strategy);
  return name === "plain" ? "Plain decoding" : name;
}

/** Nothing is known of any tree any more. */
export function clearTree() {
  nodes.clear();
  session = root = null;
  idle.hidden = false;
  wake();
}

/** Take in a `tree` event. */
export function growTree(tree) {
  idle.hidden = true;
  if (tree.session !== session) {
    session = tree.session;
    nodes.clear();
    camera = tree.position;
  }
  const now = performance.now() / 1000;
  const rows = heights(tree.nodes.filter((node) => node.state !== "pruned"), tree.root);
  for (const told of tree.nodes) {
    const node = nodes.get(told.id) ?? appear(told, tree);
    if (node.state !== told.state) turn(node, told.state, now);
    Object.assign(node, { score: told.score, seen: tree.at });
    const height = told.state === "accepted" ? 0 : rows.get(told.id);
    if (height !== undefined) node.to = height;
  }
  root = { id: tree.root, position: tree.position };
  for (const node of nodes.values()) {  // what this page was told of and has missed the end of
    if (node.seen !== tree.at && node.state !== "accepted" && node.state !== "pruned") {
      turn(node, "pruned", now);
    }
  }
  const count = (state) => tree.nodes.filter((node) => node.state === state).length;
  canvas.dataset.pruned = Number(canvas.dataset.pruned ?? 0) + count("pruned");
  canvas.setAttribute("aria-label", `The draft tree after ${JSON.stringify(tree.root_text)}: ${count("drafted")} `
    + `guesses on D0, ${count("sent")} in the pipeline, ${count("accepted") - 1} became text, `
    + `${count("pruned")} cut`);
  wake();
}

/** A node that was cut stays where it was while it fades, however the others move. */
function turn(node, state, now) {
  Object.assign(node, { state, since: now, still: state === "pruned" ? node.y * row : null });
}

/** Columns of text before the newest root. */
const trail = () => (canvas.clientWidth < NARROW ? 1.5 : 3);

function appear(told, tree) {
  const parent = nodes.get(told.parent);
  const node = { id: told.id, parent: told.parent, x: tree.position + told.depth, y: parent ? parent.y : 0, to: 0,
    text: shown(told.text), state: null, score: told.score, since: 0, seen: 0, still: null, light: isStill() ? 1 : 0 };
  nodes.set(told.id, node);
  canvas.dataset.grown = Number(canvas.dataset.grown ?? 0) + 1;
  return node;
}

/** White space that can be seen. */
function shown(text) {
  const told = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return told.trim() || told.replace(/ /g, "␣");
}

function paint(now) {
  const { draw, width, height } = cleared(canvas);
  if (!root) return false;
  const step = Math.min(0.1, now - before), ease = isStill() ? 1 : 1 - Math.exp(-SPEED * step);
  before = now;
  camera += (root.position - camera) * ease;
  let moving = Math.abs(root.position - camera) > 0.002;
  moving = fit(width, height, ease) || moving;
  const place = (node) => ({ x: 18 + (node.x - camera + trail()) * column,
    y: node.still === null ? level + node.y * row : Math.min(Math.max(level + node.still, 6), height - 6) });
  for (const node of nodes.values()) {
    const cut = node.state === "pruned";
    const fading = FADED * Math.max(0, 1 - (now - node.since) / GONE_S);
    node.y += (node.to - node.y) * ease;
    node.light = cut ? Math.min(node.light, fading) : node.light + (1 - node.light) * ease;
    if (cut && node.light <= 0.01 || node.x < camera - trail() - 2) nodes.delete(node.id);
    moving ||= Math.abs(node.to - node.y) > 0.01 || cut || node.light < 0.99;
  }
  const upwards = [...nodes.values()].sort((a, b) => LAYERS.indexOf(a.state) - LAYERS.indexOf(b.state));
  const labels = placeLabels(place);
  for (const cut of [true, false]) {  // what was cut lies behind the rest, with its labels
    const these = upwards.filter((node) => (node.state === "pruned") === cut);
    for (const node of these) drawEdge(draw, node, place);
    for (const node of these) drawDot(draw, node, place(node));
    drawLabels(draw, labels.filter(({ node }) => (node.state === "pruned") === cut));
  }
  return moving;
}

/** Choose columns and rows so that the whole tree is on the canvas: at once if it would not be. Whether they
 * go on changing. */
function fit(width, height, ease) {
  let right = 6, up = 1, down = 1;
  for (const { x, y, to, still } of nodes.values()) {
    right = Math.max(right, x - camera);
    if (still !== null || x < camera - trail()) continue;
    up = Math.max(up, -y, -to);
    down = Math.max(down, y, to);
  }
  const closer = (now, wanted) => (wanted < now ? wanted : now + (wanted - now) * ease);
  const wide = Math.min(WIDEST_COLUMN, (width - 18) / (right + trail() + 1));
  const high = Math.min(HIGHEST_ROW, (height - 2 * MARGIN) / (up + down));
  column = closer(column, wide);
  row = closer(row, high);
  const middle = height / 2 + (up - down) * row / 2;
  level = level ? level + (middle - level) * ease : middle;
  level = Math.min(Math.max(level, MARGIN + up * row), height - MARGIN - down * row);
  return Math.max(wide - column, high - row, Math.abs(middle - level)) > 0.2;
}

function drawEdge(draw, node, place) {
  const parent = nodes.get(node.parent);
  if (!parent) return;
  const from = place(parent), to = place(node), middle = (from.x + to.x) / 2;
  draw.globalAlpha = node.light * (node.state === "drafted" ? 0.45 : 0.8);
  draw.strokeStyle = colour(node.state);
  draw.lineWidth = node.state === "accepted" ? 3 : node.state === "sent" ? 1.6 : 1;
  draw.beginPath();
  draw.moveTo(from.x, from.y);
  draw.bezierCurveTo(middle, from.y, middle, to.y, to.x, to.y);
  draw.stroke();
  draw.globalAlpha = 1;
}

/** The more likely, the larger. */
function drawDot(draw, node, { x, y }) {
  const most = (room) => Math.max(1.5, room);  // in a crowded tree
  const size = node.state === "accepted" ? Math.min(most(0.2 * column), 4.5)
    : Math.min(most(0.6 * Math.min(row, column)), 2 + 3 * Math.exp(node.score / 2));
  draw.globalAlpha = node.light;
  draw.beginPath();
  draw.arc(x, y, size, 0, 2 * Math.PI);
  draw.fillStyle = colour(node.state === "drafted" ? "panel" : node.state);
  draw.fill();
  draw.lineWidth = 1.4;
  draw.strokeStyle = colour(node.state);
  draw.stroke();
  draw.globalAlpha = 1;
}

/** Labels where there is room: [{node, text, left, right, top, bottom}], the best nodes first, those that were cut last.
 * No line and no node of the tree lies behind a label: only what was cut, and the lines to its own node's children, which
 * begin there, unless they are many in little room. */
function placeLabels(place) {
  const placed = [], marks = drawnMarks(place);
  const rank = (node) => (node.state === "accepted" ? 1 : node.state === "pruned" ? node.score - 1e6 : node.score);
  for (const node of [...nodes.values()].sort((a, b) => rank(b) - rank(a))) {
    const { x, y } = place(node), low = node.state === "accepted";
    const most = Math.floor((column - (low ? 8 : 17)) / LETTER);
    if (node.light < 0.3 || node.text.length > most && most < 4) continue;
    const text = node.text.length > most ? `${node.text.slice(0, most - 1)}…` : node.text;
    // Text stands below its line and ends at its node: on the other side the tree spreads.
    const long = LETTER * text.length, left = low ? x + 4 - long : x + 9, middle = low ? y + LABEL + 3 : y;
    const label = { node, text, left, right: left + long, top: middle - LABEL / 2, bottom: middle + LABEL / 2 };
    const cut = node.state === "pruned";
    const hides = (mark) => (cut || !mark.cut) && meet(label, mark)
      && !(mark.from === null ? mark.of === node.id : mark.from === node.id && (mark.level || row >= LABEL));
    if (left < 0 || placed.some((other) => meet(label, other)) || marks.some(hides)) continue;
    placed.push(label);
  }
  return placed;
}

const meet = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom
  && other.top < one.bottom;

/** What is drawn besides labels, as boxes: [{of, from, cut, level, left, right, top, bottom}], a node, or a piece of the
 * line to it. `of`: the node's id, `from`: its parent's if it is a line, which may be `level`. */
function drawnMarks(place) {
  const marks = [];
  for (const node of nodes.values()) {
    const to = place(node), parent = nodes.get(node.parent), of = node.id, cut = node.state === "pruned";
    marks.push({ of, from: null, cut, left: to.x - DOT, right: to.x + DOT, top: to.y - DOT, bottom: to.y + DOT });
    if (!parent) continue;
    const from = place(parent), level = Math.abs(to.y - from.y) < 2;
    let before = from;
    for (let piece = 1; piece <= PIECES; piece += 1) {
      const t = piece / PIECES;  // as drawEdge's curve has it
      const here = { x: from.x + (to.x - from.x) * (1.5 * t - 1.5 * t * t + t ** 3),
        y: from.y + (to.y - from.y) * (3 * t * t - 2 * t ** 3) };
      marks.push({ of, from: parent.id, cut, level, left: before.x, right: here.x,
        top: Math.min(before.y, here.y) - LINE, bottom: Math.max(before.y, here.y) + LINE });
      before = here;
    }
  }
  return marks;
}

function drawLabels(draw, labels) {
  draw.font = `${LABEL}px ui-monospace, "DejaVu Sans Mono", Menlo, monospace`;
  draw.textAlign = "left";
  draw.textBaseline = "middle";
  for (const { node, text, left, right, top } of labels) {
    // The line to a node's best child runs level with it: behind the letters it would strike them out.
    draw.globalAlpha = 1;
    draw.fillStyle = colour("panel");
    draw.fillRect(left - 2, top, right - left + 4, LABEL);
    draw.globalAlpha = node.light;
    draw.fillStyle = colour(node.state === "drafted" ? "muted" : node.state === "sent" ? "ink" : node.state);
    draw.fillText(text, left, top + LABEL / 2);
  }
  draw.globalAlpha = 1;
}
