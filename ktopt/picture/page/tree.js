// The list of modules: a tree of which only the rows in sight are in the document, so that 75,000 open ones scroll as easily as ten.
"use strict";

const ROW = 28; // pixels, as in page.css
const BEYOND = 10; // rows kept above and below what is in sight
const PRINTED = 3000;
const FEW = 70;

const tree = { root: null, rows: [], active: null, words: [], unfolded: false, drawn: "" };

function startTree() {
  const list = byId("tree");
  list.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  new ResizeObserver(draw).observe(list);
  list.addEventListener("keydown", pressed);
  list.addEventListener("click", clicked);
  list.addEventListener("focus", () => { if (tree.active) showDetails(tree.active); });
  list.addEventListener("pointerover", (event) => {
    const item = itemOf(event.target);
    if (item && event.pointerType === "mouse") showDetails(item);
  });
  list.addEventListener("pointerleave", () => { if (tree.active) showDetails(tree.active); });
  byId("open-all").addEventListener("click", () => openAll(true));
  byId("close-all").addEventListener("click", () => openAll(false));
  byId("unfold-all").addEventListener("click", unfoldAll);
  let waiting = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 80);
  });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    search();
    byId("tree").focus();
    activate(tree.rows.find((item) => item.hit) || tree.rows[0]);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    event.preventDefault();
    byId("search").focus();
  });
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw());
  plant(null);
}

/** Begin the tree anew, with what a search found or with everything. */
function plant(filter) {
  tree.root = new Item(plan.tree, null, null, [0], filter);
  tree.unfolded = false;
  tree.active = null;
  if (filter) openTo(tree.root);
  else openFirst(tree.root);
  refresh();
  activate(tree.rows.find((item) => item.hit) || tree.rows[0], false);
}

/** Open all that is folded where that makes few rows, else single modules down to the first that stands for several. */
function openFirst(item, all = rowsBelow(item) < FEW) {
  item.open = item.hasChildren && (all || (item.count === 1 && item.level < 4));
  if (item.open) item.children.forEach((child) => openFirst(child, all));
}

function rowsBelow(item) {
  return item.children.reduce((rows, child) => rows + 1 + rowsBelow(child), 0);
}

/** Open what leads to what was found. */
function openTo(item) {
  if (item.hit || !item.filter) return;
  item.open = true;
  item.children.forEach(openTo);
}

function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.join(" ") === tree.words.join(" ")) return;
  tree.words = words;
  if (!words.length) {
    setText(byId("found"), "");
    plant(null);
    return;
  }
  const { filter, found, bytes: total } = find(words);
  setText(byId("found"), `${count(found)} found${total ? `, ${bytes(total)}` : ""}`);
  if (filter) plant(filter);
  else {
    tree.rows = [];
    tree.active = null;
    refresh([]);
  }
}

function openAll(wanted) {
  const visit = (item) => {
    if (!item.hasChildren) return;
    item.open = wanted || !item.above;
    if (wanted || item.made) item.children.forEach(visit);
  };
  visit(tree.root);
  refresh();
}

/** Show each module instead of groups, wherever that is open or closed; or fold again. */
function unfoldAll() {
  tree.unfolded = !tree.unfolded;
  const visit = (item) => {
    item.unfold(tree.unfolded);
    if (item.hasChildren) item.open = true;
    item.children.forEach(visit);
  };
  if (tree.unfolded) visit(tree.root);
  else plant(tree.root.filter);
  refresh();
}

function shown(item) {
  return !item.above || (item.above.open && item.above.made?.includes(item) && shown(item.above));
}

/** Work out the rows anew and draw them. */
function refresh(rows) {
  if (rows) tree.rows = rows;
  else {
    tree.rows = [];
    const add = (item) => {
      item.row = tree.rows.push(item) - 1;
      if (item.open) item.children.forEach(add);
    };
    add(tree.root);
  }
  while (tree.active && !shown(tree.active)) tree.active = tree.active.above;
  byId("unfold-all").setAttribute("aria-pressed", String(tree.unfolded));
  setText(byId("unfold-all"), tree.unfolded ? "Fold all" : "Unfold all");
  byId("rows").style.height = `${tree.rows.length * ROW}px`;
  tree.drawn = "";
  draw();
}

/** Put the rows that are in sight into the document; all of them, up to a limit, for a printer. */
function draw(printing) {
  const list = byId("tree");
  const all = printing === true;
  // rows that have just become fewer may not have moved the list yet
  const top = Math.min(list.scrollTop, Math.max(0, tree.rows.length * ROW - list.clientHeight));
  const first = all ? 0 : Math.max(0, Math.floor(top / ROW) - BEYOND);
  const last = Math.min(tree.rows.length, all ? PRINTED : Math.ceil((top + list.clientHeight) / ROW) + BEYOND);
  const drawn = `${first} ${last} ${tree.active?.row}`;
  if (drawn === tree.drawn) return;
  tree.drawn = drawn;
  byId("rows").replaceChildren(...tree.rows.slice(first, last).map(rowOf));
  if (tree.active) list.setAttribute("aria-activedescendant", `row-${tree.active.row}`);
  else list.removeAttribute("aria-activedescendant");
}

function rowOf(item) {
  const own = item.facts;
  const siblings = item.above ? item.above.children : [item];
  const plain = own.op === "default";
  const row = make("div", {
    role: "treeitem",
    id: `row-${item.row}`,
    class: `row${item.hit ? " hit" : ""}${item === tree.active ? " active" : ""}`,
    "aria-level": item.level,
    "aria-setsize": siblings.length,
    "aria-posinset": siblings.indexOf(item) + 1,
    "aria-expanded": item.hasChildren ? String(item.open) : null,
    "aria-selected": String(item === tree.active),
  },
    make("span", { class: "name" },
      make("span", { class: item.hasChildren ? "twist" : "twist none", "aria-hidden": "true" }),
      make("span", { class: "path" }, ...marked(item.name)),
      timesOf(item),
      make("span", { class: "class" }, plain ? ` ${shortClass(own)}` : "")),
    make("span", { class: "operator" }, ...(plain ? [] : marked(own.op))),
    devicesOf(item),
    make("span", { class: "rule" }, ...(own.rule === undefined ? [] : marked(plan.rules[own.rule].id))),
    make("span", { class: "bytes" }, item.bytes ? bytes(item.bytes) : "", shareOf(item)));
  row.style.setProperty("--level", item.level - 1);
  row.style.top = `${item.row * ROW}px`;
  return row;
}

/** How many modules a row stands for, as a button for the mouse; the keyboard has Shift and an arrow. */
function timesOf(item) {
  if (item.canUnfold) {
    const title = item.unfolded ? "Fold them again" : "Show each of them";
    return make("span", { class: "times", title }, `${item.unfolded ? "−" : "×"}${count(item.count)}`);
  }
  return item.count > 1 ? make("span", { class: "times plain" }, `×${count(item.count)}`) : null;
}

function shareOf(item) {
  const share = make("span", { class: "share", "aria-hidden": "true" });
  share.style.width = `${(100 * item.bytes) / (tree.root.bytes || 1)}%`;
  return share;
}

function shortClass(own) {
  return (own.cls || "").split(".").pop();
}

/** The devices of a module and all below it: two by name, more by number. */
function devicesOf(item) {
  const names = [...item.devices].sort(byDevice);
  if (names.length < 3) return make("span", { class: "devices" }, ...names.map((name) => make("span", { class: "device" }, swatch(name), ...marked(name))));
  return make("span", { class: "devices", title: names.join(", ") }, ...names.slice(0, 9).map(swatch), `${names.length} devices`);
}

function byDevice(a, b) {
  return (deviceNumber.get(a) ?? 0) - (deviceNumber.get(b) ?? 0);
}

function swatch(device) {
  return make("span", { class: `swatch b${deviceNumber.get(device)}`, "aria-hidden": "true" });
}

/** A text with the words that are looked for marked in it. */
function marked(text) {
  const words = tree.words.flatMap((word) => [word, word.split(/[.[\]]/).filter(Boolean).pop()]).filter(Boolean);
  const lower = text.toLowerCase();
  const spans = words.map((word) => [lower.indexOf(word), word.length]).filter(([at]) => at >= 0);
  if (!spans.length) return [text];
  const [at, length] = spans.sort((a, b) => a[0] - b[0] || b[1] - a[1])[0];
  return [text.slice(0, at), make("mark", {}, text.slice(at, at + length)), text.slice(at + length)];
}

function itemOf(element) {
  const row = element.closest?.('[role="treeitem"]');
  return row ? tree.rows[Number(row.id.slice("row-".length))] : null;
}

function activate(item, scroll = true) {
  if (!item) return;
  tree.active = item;
  if (scroll) {
    const list = byId("tree");
    const top = item.row * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  }
  draw();
  showDetails(item);
}

function toggle(item, wanted = !item.open) {
  if (!item.hasChildren) return;
  item.open = wanted;
  refresh();
}

function setUnfolded(item, wanted) {
  item.unfold(wanted);
  refresh();
}

function clicked(event) {
  const item = itemOf(event.target);
  if (!item) return;
  activate(item, false);
  if (event.target.closest(".times:not(.plain)")) setUnfolded(item, !item.unfolded);
  else toggle(item);
}

function pressed(event) {
  const item = tree.active;
  if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Math.max(1, Math.floor(byId("tree").clientHeight / ROW) - 1);
  const last = tree.rows.length - 1;
  const moves = { ArrowDown: item.row + 1, ArrowUp: item.row - 1, Home: 0, End: last, PageDown: item.row + page, PageUp: item.row - page };
  if (event.key in moves) activate(tree.rows[Math.min(last, Math.max(0, moves[event.key]))]);
  else if (event.key === "ArrowRight" && event.shiftKey) setUnfolded(item, true);
  else if (event.key === "ArrowLeft" && event.shiftKey) fold(item);
  else if (event.key === "ArrowRight") {
    if (item.hasChildren && !item.open) toggle(item, true);
    else if (item.open) activate(item.children[0]);
  } else if (event.key === "ArrowLeft") {
    if (item.open && item.hasChildren) toggle(item, false);
    else if (item.above) activate(item.above);
  } else if (event.key === "Enter" || event.key === " ") toggle(item);
  else if (event.key === "*") {
    for (const sibling of item.above ? item.above.children : [item]) if (sibling.hasChildren) sibling.open = true;
    refresh();
  } else return;
  event.preventDefault();
}

/** Fold a group, or the one that a member stands in. */
function fold(item) {
  const group = item.unfolded ? item : item.above?.unfolded ? item.above : null;
  if (!group) return;
  setUnfolded(group, false);
  activate(group);
}

/** Open what is above a module, and go to it or to the group that it is in. */
function reveal(path) {
  if (tree.words.length) {
    byId("search").value = "";
    search();
  }
  let item = tree.root;
  for (const name of path ? path.split(".") : []) {
    item.open = true;
    const has = (child) => (child.node.k ? child.positions.some((at) => String(child.node.k[at]) === name) : child.node.n === name);
    let child = item.children.find(has);
    if (child?.unfolded) {
      child.open = true;
      child = child.children.find(has);
    }
    if (!child) break;
    item = child;
  }
  refresh();
  byId("tree").focus({ preventScroll: true });
  byId("modules-title").scrollIntoView({ block: "start" });
  activate(item);
}
