// The page begins. `data-ready` on the document says when the first rows are drawn, in milliseconds since it was opened.
"use strict";

const SCHEMES = { "": "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };

function startScheme() {
  const names = Object.keys(SCHEMES);
  let chosen = "";
  const shows = () => {
    if (chosen) document.documentElement.dataset.scheme = chosen;
    else delete document.documentElement.dataset.scheme;
    setText(byId("scheme"), SCHEMES[chosen]);
  };
  byId("scheme").addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    shows();
  });
  shows();
}

/** A click on a box of the drawing goes to its row. */
function startDrawing() {
  byId("drawing").addEventListener("click", (event) => {
    const module = event.target.closest(".module");
    if (module) reveal(module.dataset.path);
  });
}

startScheme();
showWords();
showDevices();
startTree();
startDrawing();
showTransfers();
requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = String(Math.round(performance.now())); }));
