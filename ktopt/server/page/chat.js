// The chat: turns of a question and its answer, which streams in.
"use strict";

const KEPT_CHAT = "ktopt.chat";
const NEAR_PX = 80;

/** Turns {question, answer, error, note} with their elements; `running` is the one that still grows, and what ends it. */
const chat = { turns: [], running: null };

/** What is sent: questions that were answered, however shortly, and the new one. */
function messagesOf(turns) {
  const messages = [];
  const system = byId("system").value.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const turn of turns) {
    if (!turn.answer && turn !== turns[turns.length - 1]) continue;
    messages.push({ role: "user", content: turn.question });
    if (turn.answer) messages.push({ role: "assistant", content: turn.answer });
  }
  return messages;
}

function bodyOf(turns) {
  const body = { messages: messagesOf(turns), stream: true, stream_options: { include_usage: true } };
  const name = byId("model").textContent;
  if (name) body.model = name;
  const temperature = byId("temperature").value;
  const tokens = byId("max-tokens").value;
  if (temperature !== "") body.temperature = Number(temperature);
  if (tokens !== "") body.max_tokens = Number(tokens);
  return body;
}

function ask(question) {
  if (chat.running || !question.trim()) return false;
  if (!byId("options").checkValidity()) {
    byId("settings").open = true;
    byId("options").reportValidity();
    return false;
  }
  const turn = { question, answer: "", error: "", note: "" };
  chat.turns.push(turn);
  showTurn(turn);
  answer(turn);
  return true;
}

/** Have a turn answered, from the start. */
async function answer(turn) {
  const aborting = new AbortController();
  chat.running = { turn, aborting };
  Object.assign(turn, { answer: "", error: "", note: "" });
  const began = performance.now();
  const told = { first: 0, last: 0, usage: null, finish: "" };
  busy(true);
  update(turn);
  scrollDown();
  keepChat();
  try {
    const response = await request("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(bodyOf(chat.turns.slice(0, chat.turns.indexOf(turn) + 1))),
      signal: aborting.signal,
    });
    for await (const event of events(response)) {
      if (event.usage) told.usage = event.usage;
      const choice = event.choices?.[0];
      if (choice?.finish_reason) told.finish = choice.finish_reason;
      const text = choice?.delta?.content;
      if (!text) continue;
      told.last = performance.now();
      told.first ||= told.last;
      turn.answer += text;
      updateSoon(turn);
    }
    turn.note = noteOf(told, began);
  } catch (error) {
    if (error.name === "AbortError") turn.note = "Stopped.";
    else turn.error = error instanceof ApiProblem ? error.message : `The answer can't be read: ${error.message}`;
  }
  chat.running = null;
  busy(false);
  update(turn);
  keepChat();
  say(turn.error || (turn.note === "Stopped." ? "Answer stopped" : "Answer complete"));
}

/** How much and how fast, in a line. */
function noteOf({ first, last, usage, finish }, began) {
  const parts = [];
  if (finish === "length") parts.push("ended at the limit of tokens");
  if (usage) {
    const made = usage.completion_tokens;
    parts.push(plural(made, "token"));
    if (made > 1 && last > first) parts.push(`${rate(((made - 1) * 1000) / (last - first))} a second`);
  }
  if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} from the cache` : ""}`);
  return parts.join(" · ");
}

function stop() {
  chat.running?.aborting.abort();
}

function newChat() {
  stop();
  chat.turns = [];
  byId("log").replaceChildren();
  byId("welcome").hidden = false;
  keepChat();
  byId("question").focus();
  say("New chat");
}

function busy(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  byId("log").setAttribute("aria-busy", String(on));
  if (on) say("Answering");
}

function showTurn(turn) {
  byId("welcome").hidden = true;
  turn.body = make("div", { class: "text" });
  turn.thought = make("div", { class: "text" });
  turn.thinking = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), turn.thought);
  turn.problem = make("p", { class: "problem", role: "alert", hidden: true });
  turn.about = make("span", { class: "about" });
  turn.foot = make("footer", { hidden: true }, turn.about, copyButton(() => turn.answer, "Copy the answer"),
    button("Retry", "Answer again", () => retry(turn), "quiet retry"));
  const question = make("div", { class: "question" }, make("h3", { class: "unseen" }, "You"), make("div", { class: "said" }, turn.question));
  turn.article = make("article", { class: "answer" }, make("h3", { class: "unseen" }, "Answer"), turn.thinking, turn.body, turn.problem, turn.foot);
  turn.node = make("div", { class: "turn" }, question, turn.article);
  byId("log").append(turn.node);
}

/** Draw a turn before the next frame, however many pieces come until then. */
function updateSoon(turn) {
  if (turn.drawing) return;
  turn.drawing = requestAnimationFrame(() => update(turn));
}

function update(turn) {
  cancelAnimationFrame(turn.drawing);
  turn.drawing = 0;
  const following = nearEnd();
  const running = chat.running?.turn === turn;
  const { thought, text } = parted(turn.answer);
  turn.thinking.hidden = !thought;
  showMarkdown(turn.thought, thought);
  showMarkdown(turn.body, text);
  turn.article.classList.toggle("running", running);
  turn.article.classList.toggle("empty", running && !turn.answer);
  show(turn.problem, turn.error);
  setText(turn.about, turn.note);
  turn.foot.hidden = running;
  turn.foot.children[1].hidden = !turn.answer;
  if (following) scrollDown();
}

/** What a model thought before its answer, where it marks that. */
function parted(answer) {
  const begun = /^\s*<think>/.exec(answer);
  if (!begun) return { thought: "", text: answer };
  const end = answer.indexOf("</think>");
  if (end < 0) return { thought: answer.slice(begun[0].length), text: "" };
  return { thought: answer.slice(begun[0].length, end).trim(), text: answer.slice(end + 8).trimStart() };
}

/** Answer the last turn again: the others have no such button. */
function retry(turn) {
  if (chat.running) return;
  byId("question").focus();
  answer(turn);
}

function nearEnd() {
  const box = byId("scroller");
  return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
}

function scrollDown() {
  const box = byId("scroller");
  box.scrollTop = box.scrollHeight;
}

function keepChat() {
  const kept = chat.turns.map(({ question, answer, error, note }) => ({ question, answer, error, note }));
  try {
    sessionStorage.setItem(KEPT_CHAT, JSON.stringify(kept));
  } catch {
    sessionStorage.removeItem(KEPT_CHAT); // too long to be kept: the chat lasts as long as the page
  }
}

function startChat() {
  for (const turn of JSON.parse(sessionStorage.getItem(KEPT_CHAT) || "[]")) {
    chat.turns.push(turn);
    showTurn(turn);
    update(turn);
  }
  scrollDown();
  const question = byId("question");
  const send = () => {
    if (ask(question.value)) question.value = "";
    fit(question);
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  question.addEventListener("input", () => fit(question));
  byId("stop").addEventListener("click", () => {
    stop();
    question.focus();
  });
  byId("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !byId("chat").hidden) stop();
  });
}

/** As high as its text, up to what the style allows. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
