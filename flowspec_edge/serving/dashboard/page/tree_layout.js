// How high every node of a tree stands, so that no two are in one place.

/** Heights by id, in rows, the root's is 0: every leaf has a row of its own, the best child the middle
 * ones, and a parent stands level with its best child.  `nodes` as in a `tree` event. */
export function heights(nodes, root) {
  const children = new Map();
  for (const node of nodes) {
    if (node.id === root) continue;
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const rows = new Map();
  let next = 0;
  (function place(id) {
    const own = centred((children.get(id) ?? []).sort((a, b) => b.score - a.score));
    if (!own.length) {
      rows.set(id, next);
      next += 1;
      return;
    }
    for (const child of own) place(child.id);
    const best = own.reduce((a, b) => (b.score > a.score ? b : a));
    rows.set(id, rows.get(best.id));
  })(root);
  const origin = rows.get(root);
  for (const [id, row] of rows) rows.set(id, row - origin);
  return rows;
}

/** The best in the middle, the others in turn above and below. */
function centred(sorted) {
  const order = [];
  sorted.forEach((node, i) => (i % 2 ? order.unshift(node) : order.push(node)));
  return order;
}
