// The server's API: requests with the key, errors in words, streams of server-sent events.
"use strict";

/** An answer that isn't one: the server's message, or why there was none. */
class ApiProblem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** A response whose status is good. ApiProblem else; a wrong or missing key opens the settings at its field. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = byId("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiProblem("The server can't be reached.");
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status === 401) {
    byId("settings").open = true;
    byId("key").setAttribute("aria-invalid", "true");
    byId("key-note").textContent = key ? "The server doesn't take this key." : "This server asks for a key.";
  }
  throw problem;
}

async function problemOf(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = "";
  }
  return new ApiProblem(message || `The server answered with status ${response.status}.`, response.status);
}

const getJson = async (path, options) => (await request(path, options)).json();

/** The data of each event of a stream, as parsed JSON, until "[DONE]". ApiProblem for an error within it, and for an end too early. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) throw new ApiProblem("The answer broke off: the connection ended.");
      const lines = (kept + value).split(/\r\n|\n/);
      kept = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "" || !data.length) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new ApiProblem(event.error.message || "The answer failed.");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiProblem("The answer broke off: the connection was lost.");
  }
}
