// Markdown as nodes. Only text nodes and a fixed set of elements are made: HTML in the text stays text, images become links, and links
// lead to http, https and mailto alone. Work grows with the text's length, whatever it holds.
"use strict";

const DEEPEST = 8;
const LONGEST_LABEL = 1000;
const LONGEST_ADDRESS = 4000;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const QUOTE = /^ {0,3}>/;

/** Make `container` show a text, keeping the nodes of blocks that haven't changed: for a text that grows. */
function showMarkdown(container, text) {
  const blocks = blocksOf(text.split("\n"));
  const shown = container.blocks || [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].key) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(blockNode(block, 0));
  container.blocks = blocks.map((block) => block.key);
}

/** Lines as blocks {kind, lines, key}; equal keys look equal. */
function blocksOf(lines) {
  const blocks = [];
  const add = (kind, from, to, more = {}) => {
    const taken = lines.slice(from, to);
    blocks.push({ kind, lines: taken, ...more, key: `${kind}\n${more.closed}\n${taken.join("\n")}` });
    return to;
  };
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const end = endOfFence(lines, at + 1, fence[1]);
      at = add("code", at, Math.min(end + 1, lines.length), { language: fence[2].trim(), closed: end < lines.length });
    } else if (HEADING.test(line)) at = add("heading", at, at + 1);
    else if (RULE.test(line)) at = add("rule", at, at + 1);
    else if (QUOTE.test(line)) at = add("quote", at, take(lines, at, (next) => QUOTE.test(next)));
    else if (ITEM.test(line)) at = add("list", at, endOfList(lines, at));
    else if (isTable(lines, at)) at = add("table", at, take(lines, at, (next) => next.includes("|")));
    else at = add("paragraph", at, take(lines, at + 1, (next, place) => next.trim() && !begins(next) && !isTable(lines, place)));
  }
  return blocks;
}

const begins = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || RULE.test(line);

function take(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at], at)) at += 1;
  return at;
}

function endOfFence(lines, at, mark) {
  return take(lines, at, (line) => {
    const text = line.trim();
    return !(text.length >= mark.length && text === mark[0].repeat(text.length));
  });
}

/** A list goes on over items of its kind, indented lines, and blank lines between those. */
function endOfList(lines, at) {
  const kind = (line) => ITEM.exec(line)?.[2].slice(-1);
  const first = kind(lines[at]);
  let end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) continue;
    const blankBefore = next > end;
    const belongs = kind(line) ? kind(line) === first && !RULE.test(line) : /^(?: {2,}|\t)/.test(line) || (!blankBefore && !begins(line));
    if (!belongs && !(kind(line) && /^ {2,}/.test(line))) break;
    end = next + 1;
  }
  return end;
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

function isTable(lines, at) {
  const next = lines[at + 1];
  if (next === undefined || !lines[at].includes("|") || !next.includes("-")) return false;
  const under = cells(next);
  return under.length === cells(lines[at]).length && under.every((cell) => /^:?-+:?$/.test(cell));
}

/** A text without the characters of `ends` at its end. */
function withoutTail(text, ends) {
  let end = text.length;
  while (end && ends.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function blockNode(block, depth) {
  const { kind, lines } = block;
  if (kind === "code") return codeNode(lines.slice(1, block.closed ? -1 : undefined).join("\n"), block.language);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const level = HEADING.exec(lines[0])[1].length;
    const text = lines[0].trim().slice(level).trim();
    const bare = withoutTail(text, "#");
    return make(`h${Math.min(level + 3, 6)}`, {}, ...inline(bare === "" || bare.endsWith(" ") ? bare.trim() : text));
  }
  if (kind === "quote") return make("blockquote", {}, ...inner(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth));
  if (kind === "list") return listNode(lines, depth);
  if (kind === "table") return tableNode(lines);
  return make("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
}

function inner(lines, depth) {
  if (depth >= DEEPEST) return [make("p", {}, lines.join("\n"))];
  return blocksOf(lines).map((block) => blockNode(block, depth + 1));
}

function listNode(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const base = first[1].length;
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (item[1].length < base + 2 || !items.length)) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else {
      const blanks = line.length - line.trimStart().length;
      items[items.length - 1].push(line.replace("\t", "    ").slice(Math.min(blanks, width)));
    }
  }
  const ordered = /\d/.test(first[2]);
  const list = make(ordered ? "ol" : "ul", { start: ordered && Number.parseInt(first[2], 10) !== 1 ? Number.parseInt(first[2], 10) : null });
  for (const item of items) {
    const blocks = inner(item, depth);
    const tight = blocks.length && blocks[0].tagName === "P";
    list.append(make("li", {}, ...(tight ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks)));
  }
  return list;
}

function tableNode(lines) {
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : null));
  const row = (line, tag) => {
    const texts = cells(line);
    return make("tr", {}, ...sides.map((side, i) => make(tag, { class: side }, ...inline(texts[i] || ""))));
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  const table = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...body));
  return make("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function codeNode(text, language) {
  const name = language.split(/\s/)[0];
  const code = make("code", {}, text);
  const head = make("figcaption", {}, make("span", {}, name || "code"), copyButton(() => text, "Copy this code"));
  return make("figure", { class: "code" }, head, make("pre", { tabindex: "0" }, code));
}

const TOKEN = /\\[!-/:-@[-`{-~]|`+|\*\*|\*|__|_|~~|!?\[|<(?:https?:\/\/|mailto:)[^\s<>]+>|https?:\/\/[^\s<>]+|\n/g;

/** A text within a block as nodes. */
function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // marks that nothing closes: looked for once
  let written = "";
  const plain = (part) => { written += part; };
  const add = (node) => {
    if (written) nodes.push(document.createTextNode(written));
    written = "";
    if (node) nodes.push(node);
  };
  let at = 0;
  for (;;) {
    TOKEN.lastIndex = at;
    const found = TOKEN.exec(text);
    if (!found) break;
    plain(text.slice(at, found.index));
    const token = found[0];
    at = found.index + token.length;
    const made = missing.has(token) || depth >= DEEPEST ? null : spanAt(text, found.index, token, depth, missing);
    if (made) {
      add(made.node);
      at = made.end;
    } else if (token[0] === "\\" && token.length === 2) plain(token[1]);
    else if (token.endsWith("\n")) add(make("br"));
    else plain(token);
  }
  plain(text.slice(at));
  add(null);
  return nodes;
}

/** What a token begins: {node, end}, or null where it is but text. */
function spanAt(text, from, token, depth, missing) {
  const start = from + token.length;
  if (token[0] === "`") {
    const end = closing(text, start, token, "`");
    if (end < 0) return void missing.add(token);
    const code = text.slice(start, end).replaceAll("\n", " ");
    const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    return { node: make("code", {}, padded ? code.slice(1, -1) : code), end: end + token.length };
  }
  if (token.endsWith("[")) return linkAt(text, start, depth);
  if (token[0] === "<") return { node: link(token.slice(1, -1), [token.slice(1, -1)]) || document.createTextNode(token), end: start };
  if (token.startsWith("http")) {
    let address = withoutTail(token, ".,;:!?'\")]*_~");
    if (address.includes("(") && token[address.length] === ")") address += ")";
    const node = link(address, [address]);
    return node && { node, end: from + address.length };
  }
  const tag = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" }[token];
  if (!tag || /\s/.test(text[start] || " ") || (token[0] === "_" && /\w/.test(text[from - 1] || " "))) return null;
  const end = closing(text, start, token, token[0]);
  if (end < 0) return void missing.add(token);
  return { node: make(tag, {}, ...inline(text.slice(start, end), depth + 1)), end: end + token.length };
}

/** Where a mark closes, or -1: the same run of characters, after something that isn't a blank. */
function closing(text, from, mark, character) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at)) {
    let length = mark.length;
    while (text[at + length] === character) length += 1;
    const fits = mark.length === length || (character !== "`" && length === 3);
    const bare = character === "`" || (!/\s/.test(text[at - 1]) && !(character === "_" && /\w/.test(text[at + length] || " ")));
    if (fits && bare && at > from) return at + length - mark.length; // of three, the last close
    at += length;
  }
  return -1;
}

function linkAt(text, start, depth) {
  const length = text.slice(start, start + LONGEST_LABEL).indexOf("](");
  if (length < 0) return null;
  const middle = start + length;
  const label = text.slice(start, middle);
  let open = 1;
  let end = middle + 2;
  while (end < text.length && end < middle + LONGEST_ADDRESS && !/\s/.test(text[end])) {
    if (text[end] === "(") open += 1;
    if (text[end] === ")") open -= 1;
    if (!open) break;
    end += 1;
  }
  if (open) {
    const title = / +"[^"\n]{0,300}"\)/y;
    title.lastIndex = end;
    if (open !== 1 || !title.test(text)) return null;
    const node = link(text.slice(middle + 2, end), inline(label, depth + 1));
    return node && { node, end: title.lastIndex };
  }
  const node = link(text.slice(middle + 2, end), inline(label, depth + 1));
  return node && { node, end: end + 1 };
}

/** A link, or null where its address isn't one that leads to a page or a mail. */
function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return make("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
