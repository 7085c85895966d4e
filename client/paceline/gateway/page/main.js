/** Starts the page: the chat, its settings, and keys that hold everywhere. */

import { Chat } from "./chat.js";
import { Gateway } from "./gateway.js";
import { Settings } from "./settings.js";

const POLL = 5000; // milliseconds between looks at a model that is not loaded

const settings = new Settings(document.getElementById("settings"));
const gateway = new Gateway(settings);
const failed = (error) => {
  if (error.status === 401) settings.askForKey();
};
const chat = new Chat(document.getElementById("chat"), { gateway, settings, failed });

/** Loads what the gateway serves, and says what is missing. */
async function load() {
  const notice = document.getElementById("notice");
  let said = "";
  try {
    const model = settings.model = await gateway.model();
    const context = model.max_model_len ? `${model.max_model_len} tokens of context` : "loaded with the first message";
    document.getElementById("model").textContent = `${model.id} · ${context}`;
    document.title = `${model.id} · Paceline`;
    if (!model.max_model_len) setTimeout(load, POLL);
    if (!model.chat_template) said = "This model has no chat template: it continues your text.";
    if (model.max_model_len && !model.drafters.length) said += " There is no drafter: tokens come from the model alone.";
  } catch (error) {
    said = error.message;
    failed(error);
  }
  notice.textContent = said.trim();
  notice.hidden = !said;
}

settings.onKey(load);
addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
document.querySelector("#chat textarea").focus({ preventScroll: true });
load();
