// The plan: a drawing of the model's layers by device, and its modules as rows that open.
"use strict";

const FIRST_ROWS = 200;
const HUES = 6;
const plan = { loaded: null, steps: [], tree: null, colours: new Map() };

async function openPlan() {
  if (plan.loaded) return;
  plan.loaded = true;
  try {
    showPlan(await getJson("/api/plan"));
    show(byId("plan-problem"), "");
  } catch (error) {
    plan.loaded = null; // asked for again when the view is opened again
    show(byId("plan-problem"), error.message);
  }
}

function showPlan(found) {
  plan.steps = found.steps;
  plan.tree = treeOf(found.steps);
  plan.words = found.steps.map((step) =>
    [step.path, step.class, step.operator, step.device, step.rule || "", step.dtype, ...step.stored].join(" ").toLowerCase());
  const devices = Object.entries(found.devices).sort((a, b) => b[1] - a[1]);
  devices.forEach(([device], i) => plan.colours.set(device, i % HUES));
  const parts = [found.rule_file ? `by ${found.rule_file.split("/").slice(-2).join("/")}` : "", plural(found.rules.length, "rule")];
  if (found.dtype) parts.push(found.dtype);
  if (found.weight_bytes) parts.push(`${bytes(found.weight_bytes)} of weights`);
  if (found.left_out) parts.push(`${plural(found.left_out, "module")} not shown`);
  setText(byId("plan-about"), found.steps.length ? parts.filter(Boolean).join(" · ") : "This server was started without a plan.");
  drawLayers(devices);
  search();
}

/** One column a layer, as high as its bytes, coloured by device. */
function drawLayers(devices) {
  const layers = new Map();
  for (const step of plan.steps) {
    const layer = /^(.*?\.?(?:layers|h|blocks)\.\d+)(?:\.|$)/.exec(step.path)?.[1];
    if (!layer || !step.bytes) continue;
    if (!layers.has(layer)) layers.set(layer, new Map());
    const parts = layers.get(layer);
    parts.set(step.device, (parts.get(step.device) || 0) + step.bytes);
  }
  const sum = (parts) => [...parts.values()].reduce((a, b) => a + b, 0);
  const most = Math.max(0, ...[...layers.values()].map(sum));
  byId("plan-drawing").hidden = !devices.length;
  byId("plan-columns").hidden = !most;
  byId("plan-columns").setAttribute("aria-label", `${plural(layers.size, "layer")}, each up to ${bytes(most)}`);
  byId("plan-columns").replaceChildren(...[...layers].map(([layer, parts]) => {
    const column = make("div", { class: "column", title: `${layer}: ${bytes(sum(parts))}`, on: { click: () => find(`${layer}.`) } });
    for (const [device] of devices) {
      if (!parts.has(device)) continue;
      const part = make("div", { class: `hue${plan.colours.get(device)}` });
      part.style.height = `${(100 * parts.get(device)) / most}%`;
      column.append(part);
    }
    return column;
  }));
  byId("plan-legend").replaceChildren(...devices.map(([device, number]) =>
    make("button", { type: "button", class: "quiet", title: `Find modules on ${device}`, on: { click: () => find(device) } },
      swatch(device), `${device} `, make("b", {}, bytes(number)))));
}

function swatch(device) {
  return make("span", { class: `swatch hue${plan.colours.get(device) ?? HUES - 1}`, "aria-hidden": "true" });
}

function find(text) {
  byId("plan-search").value = text;
  search();
  byId("plan-search").focus();
}

/** Show the modules that have each word that is looked for; all of them, as a tree, where none is. */
function search() {
  const words = byId("plan-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const list = byId("plan-rows");
  if (!words.length) {
    setText(byId("plan-found"), "");
    fill(list, plan.tree ? topOf(plan.tree) : [], 0);
    return;
  }
  const found = plan.steps.filter((_, i) => words.every((word) => plan.words[i].includes(word)));
  const total = found.reduce((sum, step) => sum + step.bytes, 0);
  setText(byId("plan-found"), `${count(found.length)} of ${plural(plan.steps.length, "module")}${total ? `, ${bytes(total)}` : ""}`);
  fill(list, alike(found), 0);
}

/** The root's children, or the root where it has a row of its own. */
function topOf(tree) {
  return tree.step ? [{ ...tree, name: "(the model)", children: [] }, ...tree.children] : tree.children;
}

/** Rows of nodes, the first of them; a button has the rest. */
function fill(list, nodes, level) {
  const most = Math.max(...nodes.map((node) => node.bytes), 1);
  const rows = nodes.slice(0, FIRST_ROWS).map((node) => rowOf(node, level, most));
  list.replaceChildren(...rows);
  let shown = rows.length;
  if (shown >= nodes.length) return;
  const more = button(`Show more of ${count(nodes.length)}`, null, () => {
    const next = nodes.slice(shown, shown + FIRST_ROWS).map((node) => rowOf(node, level, most));
    shown += next.length;
    more.parentElement.before(...next);
    next[0].firstChild.focus();
    if (shown >= nodes.length) more.parentElement.remove();
  });
  list.append(make("li", { class: "more" }, more));
}

function rowOf(node, level, most) {
  const step = node.step;
  const devices = node.devices.size ? [...node.devices] : step ? [step.device] : [];
  const share = make("span", { class: "share", "aria-hidden": "true" });
  share.style.width = `${(100 * node.bytes) / most}%`;
  const name = make("span", { class: "name" }, make("span", { class: "path" }, node.name));
  if (node.times > 1) name.append(make("span", { class: "times" }, ` ×${count(node.times)}`));
  if (step) name.append(make("span", { class: "class" }, ` ${step.class}`));
  const plain = !step || step.operator === "default";
  const head = make("button", { type: "button", class: "row", "aria-expanded": "false" },
    name,
    make("span", { class: plain ? "operator plain" : "operator" }, step ? (plain ? "as it is" : step.operator) : ""),
    make("span", { class: "devices" }, ...devices.map((device) => make("span", { class: "device" }, swatch(device), device))),
    make("span", { class: "rule" }, step?.rule || ""),
    make("span", { class: "bytes" }, node.bytes ? bytes(node.bytes) : "", share));
  head.style.setProperty("--level", level);
  const row = make("li", {}, head);
  const toggle = () => {
    const open = head.getAttribute("aria-expanded") !== "true";
    head.setAttribute("aria-expanded", String(open));
    if (row.children.length === 1) row.append(...insideOf(node, level));
    for (const part of [...row.children].slice(1)) part.hidden = !open;
  };
  head.addEventListener("click", toggle);
  if (level < 2 && node.children.length && node.times === 1) toggle();
  return row;
}

/** What a row holds: what is to be said of its own module, and the rows of those below. */
function insideOf(node, level) {
  const parts = node.step ? [detailsOf(node, level)] : [];
  if (node.children.length) {
    const list = make("ul", { class: "rows", "aria-label": `Modules of ${node.path}` });
    fill(list, node.children, level + 1);
    parts.push(list);
  }
  if (parts.length) return parts;
  return [make("p", { class: "note" }, "Nothing more to say.")];
}

function detailsOf(node, level) {
  const { step } = node;
  const list = make("dl", { class: "details" });
  list.style.setProperty("--level", level);
  const add = (name, value) => value && list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  add("Path", node.path);
  add("Held in", step.stored.length ? `${step.stored.join(", ")}, as the file has it` : step.dtype);
  add("Prefill on", step.prefill_device === step.device ? "" : step.prefill_device);
  add("Each", node.times > 1 && step.bytes ? bytes(step.bytes) : "");
  for (const [asked, [runs, why]] of Object.entries(step.runs)) add(`${asked} gives way`, `to ${runs}: ${why}`);
  return list;
}

/** Arrows go from row to row, and open and close them. */
function moveInRows(event) {
  const at = event.target.closest?.(".row");
  if (!at || event.altKey || event.ctrlKey || event.metaKey) return;
  const rows = [...byId("plan-rows").querySelectorAll(".row")].filter((row) => row.offsetParent);
  const open = at.getAttribute("aria-expanded") === "true";
  const above = at.closest("ul").closest("li")?.querySelector(".row");
  const to = {
    ArrowDown: rows[rows.indexOf(at) + 1],
    ArrowUp: rows[rows.indexOf(at) - 1],
    Home: rows[0],
    End: rows[rows.length - 1],
    ArrowLeft: open ? at : above,
    ArrowRight: at,
  }[event.key];
  if (!to) return;
  event.preventDefault();
  if ((event.key === "ArrowLeft" && open) || (event.key === "ArrowRight" && !open)) at.click();
  to.focus();
}

function startPlan() {
  let waiting = 0;
  byId("plan-search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 60);
  });
  byId("plan-rows").addEventListener("keydown", moveInRows);
}
