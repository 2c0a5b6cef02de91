// The plan's modules. A node of the data stands for modules that are alike; an item is a row of the list: all members of a node, or some.
"use strict";

const plan = JSON.parse(byId("data").textContent);
const facts = plan.facts;
const deviceNumber = new Map(plan.devices.map((device, i) => [device.name, i]));

/** What all members of a node share, or a member's own. */
function pick(value, index) {
  return value !== null && typeof value === "object" && value.each ? value.each[index] : value;
}

/** Whether anything of a module is placed: a container only passes data on. */
function isPlaced(node) {
  return facts[node.f].op !== "default" || hasBytes(node);
}

function hasBytes(node) {
  return typeof node.b === "number" ? node.b > 0 : node.b.each.some((count) => count > 0);
}

/** Work out, from the bottom, what follows from a node's children: `many` members in one parent, `modules` in one member, the
    `devices` used, and one member's bytes, `total`, where all members have the same. */
function prepare(node) {
  node.many = node.k ? node.k.length : 1;
  node.modules = node.v ? 0 : 1;
  node.total = typeof node.b === "number" ? node.b : null;
  node.devices = new Set();
  if (isPlaced(node)) for (const device of devicesOfFacts(facts[node.f])) node.devices.add(device);
  for (const child of node.s || []) {
    prepare(child);
    node.modules += child.many * child.modules;
    for (const device of child.devices) node.devices.add(device);
    if (child.v) continue; // slices are part of the node's own tensors
    node.total = node.total === null || child.total === null ? null : node.total + child.many * child.total;
  }
}

function devicesOfFacts({ dev, rep = [], else: elsewhere = [] }) {
  return [dev, ...rep, ...elsewhere];
}

/** The device of one slice of a module that is split: hot ones are elsewhere. */
function deviceOfSlice(node, index) {
  const hot = pick(node.h, Math.floor(index / node.many));
  return hot.includes(node.k[index % node.many]) ? facts[node.f].else[0] : facts[node.f].dev;
}

function expand(indices, many, positions) {
  return indices.flatMap((index) => positions.map((position) => index * many + position));
}

function everyPosition(node) {
  return Array.from({ length: node.many }, (_, i) => i);
}

/** Bytes of these members of a node and all below them. */
function bytesOf(node, indices) {
  if (node.total !== null) return node.total * indices.length;
  let sum = indices.reduce((before, index) => before + pick(node.b, index), 0);
  for (const child of node.s || []) if (!child.v) sum += bytesOf(child, expand(indices, child.many, everyPosition(child)));
  return sum;
}

function joined(path, node, name) {
  if (node.v) return `${path}[${name}]`;
  return path ? `${path}.${name}` : name;
}

class Item {
  /** `context` is the item whose members have these; `above` the row that it stands under; `filter` what a search found below. */
  constructor(node, context, above, positions, filter) {
    Object.assign(this, { node, context, above, positions, filter, open: false, unfolded: false });
    this.level = above ? above.level + 1 : 1;
  }

  get facts() { return facts[this.node.f]; }

  get count() { return this.indices.length; }

  get name() {
    const { node } = this;
    if (!this.context) return "(the model)";
    const name = node.k ? ranges(this.positions.map((position) => node.k[position])) : node.n;
    return node.v ? `[${name}]` : name;
  }

  /** The path, with ranges where it stands for several. */
  get path() {
    const { node } = this;
    if (!this.context) return "";
    return joined(this.context.path, node, node.k ? ranges(this.positions.map((position) => node.k[position])) : node.n);
  }

  get indices() {
    if (!this.kept) this.kept = this.context ? expand(this.context.indices, this.node.many, this.positions) : [0];
    return this.kept;
  }

  get devices() {
    if (!this.node.v || !this.node.h) return this.node.devices;
    if (!this.on) this.on = new Set(this.indices.map((index) => deviceOfSlice(this.node, index)));
    return this.on;
  }

  get bytes() {
    if (this.sum === undefined) this.sum = bytesOf(this.node, this.indices);
    return this.sum;
  }

  get canUnfold() { return this.positions.length > 1; }

  get hasChildren() { return this.unfolded || Boolean(this.node.s); }

  /** Whether what a search looked for is this itself, rather than something below. */
  get hit() { return Boolean(this.filter?.hit); }

  get children() {
    if (!this.made) this.made = this.unfolded ? this.members() : this.below();
    return this.made;
  }

  members() {
    return this.positions.map((position) => new Item(this.node, this.context, this, [position], this.filter));
  }

  below() {
    if (this.filter && !this.filter.hit) {
      return this.filter.entries.map(({ child, positions, below }) => new Item(child, this, this, positions, below));
    }
    return (this.node.s || []).map((child) => new Item(child, this, this, everyPosition(child), null));
  }

  /** Show each member, or all as one again. */
  unfold(wanted) {
    if (!this.canUnfold || this.unfolded === wanted) return;
    this.unfolded = wanted;
    this.made = null;
    this.open = wanted || this.open;
  }
}

prepare(plan.tree);
