// The page as a whole: its three views, the settings that a tab keeps, and what is known of the model.
"use strict";

const VIEWS = ["chat", "plan", "status"];
const KEPT_SETTINGS = ["system", "temperature", "max-tokens", "key"];

function openView(name) {
  for (const view of VIEWS) {
    const chosen = view === name;
    byId(view).hidden = !chosen;
    byId(`tab-${view}`).setAttribute("aria-selected", String(chosen));
    byId(`tab-${view}`).tabIndex = chosen ? 0 : -1;
  }
  document.body.dataset.view = name;
  if (name === "plan") openPlan();
  if (name === "chat") fit(byId("question"));
  watchStatus();
}

function viewOfAddress() {
  const name = location.hash.slice(1);
  return VIEWS.includes(name) ? name : "chat";
}

function startViews() {
  for (const view of VIEWS) {
    byId(`tab-${view}`).addEventListener("click", () => {
      history.replaceState(null, "", view === "chat" ? location.pathname : `#${view}`);
      openView(view);
    });
  }
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const at = VIEWS.indexOf(viewOfAddress());
    const to = {
      ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: VIEWS.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const tab = byId(`tab-${VIEWS.at(to % VIEWS.length)}`);
    tab.click();
    tab.focus();
  });
  window.addEventListener("hashchange", () => openView(viewOfAddress()));
  document.addEventListener("visibilitychange", watchStatus);
}

/** Settings are kept in this tab's session and nowhere else. */
function startSettings() {
  for (const id of KEPT_SETTINGS) {
    const field = byId(id);
    field.value = sessionStorage.getItem(`ktopt.${id}`) || "";
    field.addEventListener("input", () => sessionStorage.setItem(`ktopt.${id}`, field.value));
  }
  byId("key").addEventListener("change", () => {
    byId("key").removeAttribute("aria-invalid");
    byId("key-note").textContent = "Kept until this tab is closed.";
    learnModel();
    openView(viewOfAddress());
  });
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  const wide = matchMedia("(min-width: 60rem)");
  const fitSettings = () => { byId("settings").open = wide.matches; };
  wide.addEventListener("change", fitSettings);
  fitSettings();
}

async function learnModel() {
  try {
    const [model] = (await getJson("/v1/models")).data;
    setText(byId("model"), model.id);
    setText(byId("welcome-model"), model.id);
    document.title = `${model.id} · ktopt`;
    if (model.max_model_len) setText(byId("facts"), `Prompt and answer together: up to ${plural(model.max_model_len, "token")}.`);
  } catch (error) {
    setText(byId("facts"), error.message);
  }
}

startSettings();
startViews();
startChat();
startPlan();
learnModel();
openView(viewOfAddress());
