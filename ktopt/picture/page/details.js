// What is to be said of the row that has the focus or the mouse.
"use strict";

function showDetails(item) {
  const own = item.facts;
  const list = make("dl", {});
  const add = (name, ...values) => {
    const said = values.filter((value) => value !== null && value !== "" && value !== undefined);
    if (said.length) list.append(make("dt", {}, name), make("dd", {}, ...said));
  };
  const kept = own.st ? `${own.st.join(", ")}, as the file has it` : own.dt;
  const operator = own.op === "default" ? "none: it stays as it is, only placed" : own.op;
  add("Class", own.cls);
  add("Role", own.role);
  add("Operator", operator);
  add("Rule", ruleText(own));
  add("By its older path", olderOf(item));
  if (item.devices.size) add("Device", ...[...item.devices].sort(byDevice).map((name) => make("span", { class: "device" }, swatch(name), name)));
  if (own.pre && own.pre !== own.dev) add("Prefill device", own.pre, " (recorded only)");
  if (isPlaced(item.node)) add("Held in", kept);
  if (item.bytes) add("Bytes", `${bytes(item.bytes)} (${count(item.bytes)})`, eachText(item));
  if (item.node.v) add("Part of", "the module above, whose tensors hold all experts");
  else add("Modules", item.node.s || item.count > 1 ? count(item.node.modules * item.count) : null);
  add("Inside", own.in ? `a closed module, ${plural(own.in, "level")} above (recursive: false)` : null);
  for (const [asked, [runs, why]] of Object.entries(own.runs || {})) add(`${asked} gives way`, `to ${runs}: ${why}`);
  add("Hot experts", hotOf(item));
  const kwargs = isPlaced(item.node) ? Object.entries(own.kw || {}) : [];
  if (kwargs.length) add("kwargs", make("span", { class: "kwargs" }, kwargs.map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join("\n")));
  const notes = notesOf(item);
  if (notes.length) add("Notes", ...notes.map((note) => make("span", { class: "line" }, note)));
  byId("details").replaceChildren(make("h3", {}, item.path || "(the model)"), list);
}

function ruleText(own) {
  if (own.rule === undefined) return "none (the default)";
  const rule = plan.rules[own.rule];
  return `${rule.id}, ${rule.file}:${rule.line}`;
}

function olderOf(item) {
  const { a } = item.node;
  if (!a) return null;
  if (item.count === 1) return olderPath(pick(a, item.indices[0]), item.path) || null;
  return typeof a === "string" ? a : pick(a, item.indices[0]) ? `${pick(a, item.indices[0])} and others` : null;
}

/** The hot experts of a split layer, on the other of its devices. */
function hotOf(item) {
  const { h, v } = item.node;
  if (!h || v) return null;
  const sets = [...new Set(item.indices.map((index) => ranges(pick(h, index))))];
  return `${sets.slice(0, 6).join(" or ")}${sets.length > 6 ? " and others" : ""}, on ${item.facts.else.join(", ")}`;
}

function eachText(item) {
  if (item.count < 2) return null;
  const each = item.bytes / item.count;
  return `, ${item.node.total === null ? "about " : ""}${bytes(each)} each`;
}

/** The notes of the members, each once. */
function notesOf(item) {
  const { o } = item.node;
  if (!o) return [];
  if (!o.each) return o;
  return [...new Set(item.indices.flatMap((index) => o.each[index]))].slice(0, 20);
}
