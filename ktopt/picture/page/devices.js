// Memory of the devices as bars, what passes between them, and the plan's own words.
"use strict";

function showDevices() {
  const most = Math.max(1, ...plan.devices.map((device) => device.memory || sum(device.bytes)));
  byId("devices").replaceChildren(...plan.devices.map((device, number) => deviceRow(device, number, most)));
  const used = plan.kinds.filter((_, kind) => plan.devices.some((device) => device.bytes[kind]));
  byId("kinds").replaceChildren(...used.map((kind) =>
    make("span", { class: "device" }, make("span", { class: `swatch kind kind-${plan.kinds.indexOf(kind)}`, "aria-hidden": "true" }), kindName(kind))));
  if (plan.context) byId("kinds").append(make("span", {}, `with a context of ${plural(plan.context, "token")}`));
}

function sum(numbers) {
  return numbers.reduce((a, b) => a + b, 0);
}

function kindName(kind) {
  const words = { embedding: "embedding and head", mlp: "MLPs and shared experts", transient: "for a moment" };
  return words[kind] || kind;
}

function deviceRow(device, number, most) {
  const held = sum(device.bytes);
  const scale = device.memory || most;
  const parts = plan.kinds.map((kind, i) => [kindName(kind), device.bytes[i], i]).filter(([, part]) => part);
  const share = device.memory ? `, ${((100 * held) / device.memory).toFixed(held < device.memory / 10 ? 1 : 0)}%` : "";
  const said = device.memory ? `${bytes(held)} of ${bytes(device.memory)}${share}` : bytes(held);
  const inWords = parts.map(([kind, part]) => `${kind} ${bytes(part)}`).join(" · ");
  const bar = make("div", { class: "bar", role: "img", "aria-label": `${device.name}: ${said} held: ${inWords}` });
  for (const [kind, part, i] of parts) {
    const piece = make("span", { class: `b${number} kind-${i}`, title: `${kind}: ${bytes(part)}` });
    piece.style.width = `${Math.min(100, (100 * part) / Math.max(scale, held))}%`;
    bar.append(piece);
  }
  const over = device.memory && held > device.memory;
  return make("div", { class: over ? "device-row over" : "device-row" },
    make("span", { class: "device-name" }, swatch(device.name), device.name, make("span", { class: "note" }, device.model ? ` ${device.model}` : "")),
    make("span", { class: "value" }, said, over ? make("strong", {}, ` ${bytes(held - device.memory)} too much`) : null),
    bar,
    make("span", { class: "note parts" }, inWords || "nothing"));
}

function showTransfers() {
  const rows = [...plan.transfers].sort((a, b) => (b.bytes ?? 0) - (a.bytes ?? 0));
  const total = plan.transfer_bytes;
  const about = rows.length
    ? `${plural(sum(rows.map((row) => row.count)), "transfer")}; a token moves ${total === null ? "an amount that isn't known" : bytes(total)} in all. ` +
      "Masks are left out; what a device has already isn't copied again."
    : "Nothing passes between devices.";
  setText(byId("transfers-about"), about);
  byId("transfers").hidden = !rows.length;
  byId("transfers").tBodies[0].replaceChildren(...rows.map((row) => make("tr", {},
    make("td", {}, swatch(row.from), row.from),
    make("td", {}, swatch(row.to), row.to),
    make("td", {}, `${row.side} of `, button((row.side === "input" ? row.target : row.source) || "the model", null, () => reveal(row.path), "link")),
    make("td", { class: "right" }, count(row.count)),
    make("td", { class: "right" }, row.bytes === null ? "?" : row.bytes ? bytes(row.bytes) : "-"),
    make("td", {}, row.what, row.own ? ", by its operator" : ""))));
}

function showWords() {
  setText(byId("model"), plan.model || plan.model_type || "model");
  const parts = [plan.rule_file && `by ${plan.rule_file}`, plan.hardware && `on ${plan.hardware}`, plan.dtype, plural(plan.tree.modules, "module")];
  const versions = Object.entries(plan.made_by).filter(([, version]) => version).map(([name, version]) => `${name} ${version}`);
  setText(byId("about"), [...parts.filter(Boolean), `${bytes(plan.weights)} of weights`, ...versions].join(" · "));
  const inactive = plan.rules.filter((rule) => !rule.active).map((rule) => `${rule.id} (${rule.file}:${rule.line}) is inactive on this machine`);
  const notes = [...plan.notes, ...inactive];
  byId("problems").hidden = !plan.errors.length;
  byId("errors").replaceChildren(...plan.errors.map((error) => make("li", { class: "problem" }, error)));
  byId("notes-section").hidden = !notes.length;
  byId("notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
}
