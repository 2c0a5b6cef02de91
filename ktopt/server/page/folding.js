// A plan's modules as a tree in which what repeats stands once: thirty equal layers are one row.
"use strict";

/** Nodes {name, path, step, children, bytes, modules, times, devices} of steps. `modules` counts those below and itself. */
function treeOf(steps) {
  const root = { name: "", path: "", step: null, byName: new Map() };
  for (const step of steps) {
    let node = root;
    let path = "";
    for (const name of step.path ? step.path.split(".") : []) {
      path = path ? `${path}.${name}` : name;
      if (!node.byName.has(name)) node.byName.set(name, { name, path, step: null, byName: new Map() });
      node = node.byName.get(name);
    }
    node.step = step;
  }
  return folded(root, new Map());
}

/** Fold what stands below a node. `known` numbers what looks the same: children that differ in nothing but their number become one. */
function folded(node, known) {
  const groups = new Map();
  for (const child of node.byName.values()) {
    const made = folded(child, known);
    const numbered = /^\d+$/.test(made.name);
    const key = numbered ? `#${made.look}` : made.name;
    if (groups.has(key)) groups.get(key).push(made);
    else groups.set(key, [made]);
  }
  node.children = [...groups.values()].map((same) => (same.length > 1 ? groupOf(same) : same[0]));
  delete node.byName;
  node.times = 1;
  node.bytes = node.step ? node.step.bytes : 0;
  node.modules = node.step ? 1 : 0;
  node.devices = new Set(node.step && node.step.bytes ? [node.step.device] : []);
  for (const child of node.children) {
    node.bytes += child.bytes;
    node.modules += child.modules;
    child.devices.forEach((device) => node.devices.add(device));
  }
  const look = `${lookOf(node.step)}(${node.children.map((child) => `${child.name}:${child.look}`).join()})`;
  if (!known.has(look)) known.set(look, known.size);
  node.look = known.get(look);
  return node;
}

/** What a module's row says but for its path. */
function lookOf(step) {
  return step ? JSON.stringify({ ...step, path: "" }) : "";
}

/** Equal nodes as one, which shows the first's children. */
function groupOf(same) {
  const [first] = same;
  const parent = first.path.slice(0, first.path.length - first.name.length);
  const name = ranges(same.map((node) => Number(node.name)));
  return {
    ...first,
    name,
    path: parent + name,
    times: same.length,
    bytes: first.bytes * same.length,
    modules: first.modules * same.length,
    look: `${first.look}x${same.length}`,
  };
}

/** Steps that differ in nothing but the numbers of their paths, each as a node; in the order of the first of each. */
function alike(steps) {
  const groups = new Map();
  for (const step of steps) {
    const key = step.path.replace(/(^|\.)\d+(?=\.|$)/g, "$1#") + lookOf(step);
    if (groups.has(key)) groups.get(key).push(step);
    else groups.set(key, [step]);
  }
  return [...groups.values()].map((same) => {
    const first = same[0].path.split(".");
    const rows = same.map((step) => step.path.split("."));
    const path = first.map((name, i) => (/^\d+$/.test(name) ? ranges(rows.map((row) => Number(row[i]))) : name)).join(".");
    const total = same.reduce((sum, step) => sum + step.bytes, 0);
    const devices = new Set(total ? [same[0].device] : []);
    return { name: path, path, step: same[0], children: [], times: same.length, bytes: total, modules: same.length, devices };
  });
}
