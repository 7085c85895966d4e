/** Helpers for the page's elements. */

/** A new element with a text and CSS classes. */
export function element(kind, text = "", classes = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

/** Calls `send` when a form is submitted, also by Enter in its text; `stop` by its button. */
export function onSend(form, send, stop) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.querySelector("textarea").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  form.elements.stop.addEventListener("click", stop);
}

/**
 * Calls `draw` once before the next frame, however often the returned function is called. Where it
 * takes long, as with a long block of a text, it takes at most a quarter of the time.
 */
export function oncePerFrame(draw) {
  let waiting = false, earliest = 0;
  const start = (now) => {
    if (now < earliest) {
      setTimeout(() => requestAnimationFrame(start), earliest - now);
      return;
    }
    waiting = false;
    const began = performance.now();
    draw();
    const ended = performance.now();
    earliest = ended + 3 * (ended - began) - FRAME;
  };
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(start);
  };
}

/** Unit: milliseconds. */
const FRAME = 16;

/** A button that calls `act`. */
export function button(name, act) {
  const made = element("button", name);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

/** A button that copies what `text` returns, and says what became of it. */
export function copyButton(text) {
  const made = button("Copy", async () => {
    // Browsers offer the clipboard to pages of this machine and to pages with HTTPS only.
    const copied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    made.textContent = copied ? "Copied" : "Copying needs HTTPS";
    setTimeout(() => { made.textContent = "Copy"; }, 2000);
  });
  return made;
}
