// Finding modules: the tree with only what leads to modules that have every word, folded where what is found is alike.
"use strict";

/** What is searched of a node beside its members' paths, and beside the devices of slices that are on several. */
function wordsOf(node) {
  const { cls, role, op, rule, st, kw } = facts[node.f];
  const on = node.v && node.h ? [] : devicesOfFacts(facts[node.f]);
  const placed = isPlaced(node) ? [op, ...on, ...(st || []), kw?.generate_op] : [];
  const by = rule === undefined ? [] : [plan.rules[rule].id, `${plan.rules[rule].file}:${plan.rules[rule].line}`];
  return [cls, role, ...placed, ...by].filter((word) => typeof word === "string").join("\n").toLowerCase();
}

/** The root's filter {hit, entries: [{child, positions, below}]} or null, how many were found, and their bytes. */
function find(words) {
  const known = new Map();
  const missing = new Map();
  let found = 0;
  let total = 0;

  const look = (node, index, path) => {
    if (!missing.has(node)) {
      const text = wordsOf(node);
      missing.set(node, words.filter((word) => !text.includes(word)));
    }
    const older = node.a ? pick(node.a, index).toLowerCase() : "";
    const also = [path, older && olderPath(older, path), node.v && node.h ? deviceOfSlice(node, index) : ""];
    const hit = missing.get(node).every((word) => also.some((text) => text.includes(word)));
    if (hit) {
      found += 1;
      total += pick(node.b, index);
    }
    const entries = [];
    let key = `${node.f} ${hit}`;
    (node.s || []).forEach((child, at) => {
      const alike = new Map();
      for (let position = 0; position < child.many; position += 1) {
        const name = child.k ? child.k[position] : child.n.toLowerCase();
        const below = look(child, index * child.many + position, joined(path, child, name));
        if (!below) continue;
        if (alike.has(below)) alike.get(below).push(position);
        else alike.set(below, [position]);
      }
      for (const [below, positions] of alike) {
        entries.push({ child, positions, below });
        key += ` ${at}:${below.number}:${positions.join()}`;
      }
    });
    if (!hit && !entries.length) return null;
    if (!known.has(key)) known.set(key, { hit, entries, number: known.size });
    return known.get(key);
  };

  return { filter: look(plan.tree, 0, ""), found, bytes: total };
}

/** An older path with the module's own numbers in the places that "#" keeps for them. */
function olderPath(template, path) {
  const numbers = path.match(/(?<![^.])\d+(?![^.])/g) || [];
  let next = 0;
  return template.replace(/#/g, () => numbers[next++] ?? "#");
}
