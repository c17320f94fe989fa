// How high every node of a tree stands: as low a tree as can be in which no two nodes, and no label, meet.

/** Heights by id, in rows, the root's is 0: a parent stands level with its best child, and the others in turn
 * below and above, as near as what is there already lets them.  `nodes` as in a `tree` event. */
export function heights(nodes, root) {
  const children = new Map();
  for (const node of nodes) {
    if (node.id === root) continue;
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  for (const siblings of children.values()) siblings.sort((a, b) => b.score - a.score);
  const shifts = new Map();  // from the parent's row, by id

  /** The highest and the lowest row of a subtree, {top, bottom}, in every column from its own on; rows count
   * from its node's. */
  function outline(id) {
    const own = children.get(id) ?? [];
    if (!own.length) return { top: [0, 0], bottom: [0, 0] };  // the second column is its label's
    const whole = { top: [0], bottom: [0] };
    own.forEach((child, i) => {
      const { top, bottom } = outline(child.id);
      const met = Math.min(top.length, whole.top.length - 1);
      let shift = 0;
      for (let k = 0; i && k < met; k += 1) {
        shift = i % 2 ? Math.max(shift, whole.bottom[k + 1] - top[k] + 1)
          : Math.min(shift, whole.top[k + 1] - bottom[k] - 1);
      }
      shifts.set(child.id, shift);
      top.forEach((row, k) => {
        whole.top[k + 1] = Math.min(whole.top[k + 1] ?? Infinity, row + shift);
        whole.bottom[k + 1] = Math.max(whole.bottom[k + 1] ?? -Infinity, bottom[k] + shift);
      });
    });
    return whole;
  }

  outline(root);
  const rows = new Map([[root, 0]]);
  for (const [id, row] of rows) {  // grows while it is walked
    for (const child of children.get(id) ?? []) rows.set(child.id, row + shifts.get(child.id));
  }
  return rows;
}
