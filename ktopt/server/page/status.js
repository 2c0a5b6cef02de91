// The status: what runs and waits, and what memory holds; asked for each second while it is to be seen.
"use strict";

const EVERY_MS = 1000;
const SPEEDS_KEPT = 60;
const watch = { timer: 0, aborting: null, speeds: [], made: new Map() };

/** Begin or end to ask, by whether the view is to be seen. */
function watchStatus() {
  const seen = !byId("status").hidden && document.visibilityState === "visible";
  if (seen && !watch.aborting) askStatus();
  if (!seen && watch.aborting) {
    clearTimeout(watch.timer);
    watch.aborting.abort();
    watch.aborting = null;
  }
}

async function askStatus() {
  const aborting = new AbortController();
  watch.aborting = aborting;
  try {
    showStatus(await getJson("/api/status", { signal: aborting.signal }));
    show(byId("status-problem"), "");
  } catch (error) {
    if (aborting.signal.aborted) return;
    if (error.status === 401) { // until there is another key
      watch.aborting = null;
      show(byId("status-problem"), error.message);
      return;
    }
    show(byId("status-problem"), `${error.message} Asked again each second.`);
  }
  if (!aborting.signal.aborted) watch.timer = setTimeout(askStatus, EVERY_MS);
}

function showStatus(found) {
  const about = [found.model, found.backend, `context of ${plural(found.context_tokens, "token")}`, `up ${duration(found.uptime_s)}`];
  if (found.closing) about.push("shutting down");
  setText(byId("status-about"), about.join(" · "));
  watch.speeds = [...watch.speeds, found.tokens_per_s].slice(-SPEEDS_KEPT);
  figure("figures", "Running", count(found.running), `of at most ${count(found.max_running)}`);
  figure("figures", "Waiting", count(found.waiting), `of at most ${count(found.max_waiting)}`);
  figure("figures", "Writing", rate(found.tokens_per_s), "tokens a second", curve(watch.speeds));
  figure("figures", "Reading", rate(found.prompt_tokens_per_s), "tokens a second");
  showPages(found.pages);
  showMemory(found);
  showRequests(found.requests);
  showTotals(found.totals);
}

/** A number with its name, made once and then changed. */
function figure(list, name, value, unit, more = null) {
  const key = `${list} ${name}`;
  if (!watch.made.has(key)) {
    const parts = { value: make("b"), unit: make("span", { class: "unit" }), more: make("span", { class: "curve", "aria-hidden": "true" }) };
    watch.made.set(key, parts);
    byId(list).append(make("div", {}, make("dt", {}, name), make("dd", {}, parts.value, " ", parts.unit, parts.more)));
  }
  const parts = watch.made.get(key);
  setText(parts.value, value);
  setText(parts.unit, unit);
  if (more) parts.more.replaceChildren(more);
}

/** The last speeds as a line. */
function curve(speeds) {
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const most = Math.max(...speeds, 1);
  const first = SPEEDS_KEPT - speeds.length;
  const points = speeds.map((speed, i) => `${first + i},${(19 - (18 * speed) / most).toFixed(1)}`).join(" ");
  const drawing = svg("svg", { viewBox: `0 0 ${SPEEDS_KEPT - 1} 20`, preserveAspectRatio: "none" });
  drawing.append(svg("polyline", { points, "vector-effect": "non-scaling-stroke" }));
  return drawing;
}

/** A bar: its name, what it says, and parts [kind, share of the bar]. */
function bar(box, name, value, parts) {
  const key = `${box} ${name}`;
  if (!watch.made.has(key)) {
    const made = { value: make("span", { class: "value" }), parts: parts.map(([kind]) => make("span", { class: kind })) };
    made.bar = make("div", { class: "bar", role: "img" }, ...made.parts);
    made.row = make("div", { class: "bar-row" }, make("span", {}, name), made.value, made.bar);
    watch.made.set(key, made);
    byId(box).append(made.row);
  }
  const made = watch.made.get(key);
  made.row.hidden = false;
  setText(made.value, value);
  made.bar.setAttribute("aria-label", `${name}: ${value}`);
  parts.forEach(([, share], i) => { made.parts[i].style.width = `${(100 * share).toFixed(2)}%`; });
}

function showPages(pages) {
  const box = byId("pages");
  box.hidden = !pages;
  box.previousElementSibling.hidden = !pages;
  if (!pages) return;
  const { used, cached, free, total, page_tokens: tokens } = pages;
  if (!box.children.length) {
    const sign = (kind, text) => make("span", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
    box.append(make("p", { class: "legend" },
      sign("used", "in use"), sign("cached", "kept for reuse"), sign("free", "free")));
  }
  const value = `${count(used)} in use · ${count(cached)} kept for reuse · ${count(free)} free`;
  bar("pages", `${plural(total, "page")} of ${plural(tokens, "token")}`, value,
    [["used", used / total], ["cached", cached / total], ["free", free / total]]);
}

/** Weights, what the engine holds by tier, and the whole process, on one scale. */
function showMemory(found) {
  const names = { memory: "Cache in memory", device: "Cache on the device", disk: "Cache on disk" };
  const kind = (name) => (name.startsWith("weights on ") ? "weights" : name === "disk" ? "disk" : "used");
  const title = (name) => names[name] || name[0].toUpperCase() + name.slice(1);
  const rows = Object.entries(found.memory_bytes).map(([name, number]) => [title(name), number, kind(name)]);
  if (found.process_bytes) rows.push(["The whole process", found.process_bytes, "process"]);
  const most = Math.max(1, ...rows.map(([, number]) => number));
  for (const [key, made] of watch.made) if (key.startsWith("memory ")) made.row.hidden = true;
  for (const [name, number, of] of rows) bar("memory", name, bytes(number), [[of, number / most]]);
}

function showRequests(requests) {
  const body = byId("requests").tBodies[0];
  if (!requests.length) {
    body.replaceChildren(make("tr", {}, make("td", { colspan: "6", class: "note" }, "Nothing runs, nothing waits.")));
    return;
  }
  body.replaceChildren(...requests.map((one) => {
    const cached = one.cached_tokens ? `, ${count(one.cached_tokens)} from the cache` : "";
    return make("tr", {},
      make("td", {}, make("span", { class: `state ${one.state}` }, one.state)),
      make("td", {}, progress(one.read_tokens, one.prompt_tokens), `${count(one.read_tokens)} of ${count(one.prompt_tokens)}${cached}`),
      make("td", {}, progress(one.new_tokens, one.max_tokens), `${count(one.new_tokens)} of ${count(one.max_tokens)}`),
      make("td", {}, duration(one.age_s)),
      make("td", {}, one.client || "–"),
      make("td", { title: one.id }, make("code", {}, one.id.slice(0, 8))));
  }));
}

function progress(done, all) {
  const part = make("span", { class: "used" });
  part.style.width = `${all ? Math.min(100, (100 * done) / all) : 0}%`;
  return make("span", { class: "bar small", "aria-hidden": "true" }, part);
}

function showTotals(totals) {
  const refused = Object.entries(totals.refused).map(([code, number]) => `${count(number)} ${code.replaceAll("_", " ")}`).join(", ");
  const share = totals.prompt_tokens ? ` (${Math.round((100 * totals.cached_tokens) / totals.prompt_tokens)} % from the cache)` : "";
  const rows = [
    ["Requests", `${count(totals.requests)}: ${count(totals.finished)} finished, ${count(totals.cancelled)} cancelled, ${count(totals.failed)} failed`],
    ["Refused", refused || "none"],
    ["Prompt tokens", count(totals.prompt_tokens) + share],
    ["Tokens written", count(totals.completion_tokens)],
    ["Steps", count(totals.steps)],
  ];
  for (const [name, value] of rows) figure("totals", name, value, "");
}
