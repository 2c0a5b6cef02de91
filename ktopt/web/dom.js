// Elements made by code, and numbers in words. Text only ever becomes text nodes: nothing here parses HTML.
"use strict";

const byId = (id) => document.getElementById(id);

/** An element. Attributes that are null or false are left out; `on` holds listeners; children are nodes or text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function button(text, label, pressed, kind = "quiet") {
  return make("button", { type: "button", class: kind, "aria-label": label, on: { click: pressed } }, text);
}

/** Set text where it differs, so that nothing is selected or announced anew for no reason. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Say something to screen readers. */
function say(text) {
  byId("said").textContent = text;
}

function show(element, message) {
  element.hidden = !message;
  setText(element, message || "");
}

const whole = new Intl.NumberFormat("en");
const count = (number) => whole.format(number);
const plural = (number, one, many = one + "s") => `${count(number)} ${number === 1 ? one : many}`;

function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function rate(number) {
  return number >= 100 ? count(Math.round(number)) : number.toFixed(1);
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

/** "{0..2,5}" for 0, 1, 2, 5. */
function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let from = 0; from < sorted.length; ) {
    let to = from;
    while (sorted[to + 1] === sorted[to] + 1) to += 1;
    parts.push(from === to ? sorted[from] : `${sorted[from]}..${sorted[to]}`);
    from = to + 1;
  }
  return parts.length === 1 && sorted.length === 1 ? String(parts[0]) : `{${parts.join()}}`;
}

/** Put a text on the clipboard; browsers give pages without TLS only the older way. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser doesn't let this page copy");
  return undefined;
}

/** A button that copies what `text()` gives, and says so. */
function copyButton(text, label) {
  const made = button("Copy", label, async () => {
    try {
      await copy(text());
      made.textContent = "Copied";
      say("Copied");
    } catch (error) {
      made.textContent = "Not copied";
      say(`Not copied: ${error.message}`);
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}
